"""Functions that return a complete run, one module a model family."""
