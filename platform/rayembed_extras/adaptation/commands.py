"""Declare the job that adapts encoders for the `rayembed` command."""

from rayembed.jobs.table import TRAIN, Command

PRETRAIN = Command(
    TRAIN,
    "Adapt an encoder by masked-language modelling, with rotary positions.\n\n"
    "The first step of Nomic Embed v2; training goes on from the encoder that it leaves. "
    "The default is a run for a laptop (all-MiniLM, Wikipedia summaries in three "
    "languages); --list shows others.",
    "rayembed_extras.adaptation.job:run_adaptation_job",
)
