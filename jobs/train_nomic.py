"""Train Nomic Embed v2 MoE, evaluate it and register it in MLflow.

The default is a run for a laptop (all-MiniLM with experts, Wikipedia summaries in three languages);
`--list` shows others. `--stage pretrain` or `--stage finetune` runs one of its stages alone.
"""

import sys

from rayembed.pipeline.run.training_job import training_job

if __name__ == "__main__":
    sys.exit(training_job("nomic-quickstart")(sys.argv[1:], about=__doc__))
