"""Tests of torch's CUDA build on a machine without a GPU: `make cuda-wheel`."""

import torch

collect_ignore_glob = [] if torch.version.cuda else ["test_*.py"]
