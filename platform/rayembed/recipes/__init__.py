"""Functions that return complete runs, in one module for each model family."""
