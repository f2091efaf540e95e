"""What all tests share: no telemetry, no network in unit tests, modules for child processes."""

import os
from pathlib import Path

import pytest

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TESTS_SUPPORT"] = str(Path(__file__).parent / "support")

HEAVY = ("distributed", "ray", "job", "assets")


def pytest_collection_modifyitems(items):
    """Keep unit and parity tests off the network, loopback excepted; skip GPU tests visibly."""
    import torch

    for item in items:
        if not any(item.get_closest_marker(name) for name in HEAVY):
            item.add_marker(pytest.mark.allow_hosts(["127.0.0.1", "::1", "localhost"]))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
