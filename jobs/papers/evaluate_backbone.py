"""Finetune an encoder on GLUE or XTREME-R as a grid over the cluster, and score it."""

import sys

from rayembed_papers.backbone.job import run_backbone_job

if __name__ == "__main__":
    sys.exit(run_backbone_job(sys.argv[1:], about=__doc__))
