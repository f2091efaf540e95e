"""Import bm25s without JAX, for all modules that need it.

It takes JAX for its top-k where that is installed, and calls it when it is imported: JAX then takes
three quarters of a GPU's memory, in every process that counts words.
"""

from rayembed.display.quiet import without

with without("jax"):
    import bm25s

__all__ = ["bm25s"]
