"""Adapt an encoder: rotary positions in place of its absolute ones, masked-language modelling.

The first step of Nomic Embed v2; train_nomic.py goes on from the encoder that it leaves. The
default is a run for a laptop (all-MiniLM, Wikipedia summaries in three languages); `--list` shows
others.
"""

import sys

from rayembed.pipeline.adaptation_job import run_adaptation_job

if __name__ == "__main__":
    sys.exit(run_adaptation_job(sys.argv[1:], about=__doc__))
