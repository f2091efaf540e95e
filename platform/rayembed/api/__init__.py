"""rayembed in Python: train, adapt, evaluate, mine, load, encode.

Each of them builds the settings that a job would build, and does what the job does: the same
folders, the same weights, the same scores.
"""

from rayembed.api.embedder import Embedder, load
from rayembed.api.measure import adapt, encode, evaluate, mine
from rayembed.api.training import Trained, train

__all__ = ["Embedder", "Trained", "adapt", "encode", "evaluate", "load", "mine", "train"]
