"""rayembed in Python: train, evaluate, mine, load, encode.

Each of them builds the settings that a job would build, and does what the job does: the same
folders, the same weights, the same scores.
"""

from rayembed.api.embedder import Embedder, encode, load
from rayembed.api.measure import evaluate, mine
from rayembed.api.training import Trained, train

__all__ = ["Embedder", "Trained", "encode", "evaluate", "load", "mine", "train"]
