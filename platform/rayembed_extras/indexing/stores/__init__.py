"""Vector stores, one module for each kind: its settings and its client."""

# First, since its table loads all stores: a store that is imported alone finds it complete.
import rayembed_extras.indexing.settings  # noqa: F401
