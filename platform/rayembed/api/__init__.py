"""Python interface of rayembed: train, adapt, evaluate, mine, load, encode.

Each of them builds the settings that a job would build, and does what the job does: the same
folders, the same weights, the same scores.
"""

from rayembed.api.embedder import Embedder, load
from rayembed.api.measure import adapt, encode, evaluate, mine
from rayembed.api.training import Trained, train
from rayembed.display.quiet import quiet

quiet()  # before the calls import the libraries that it is for

__all__ = ["Embedder", "Trained", "adapt", "encode", "evaluate", "load", "mine", "train"]
