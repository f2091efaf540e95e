"""Settings of a run: identity (everything that determines the weights) and placement (where and how
it runs). Imports neither torch nor Ray.
"""
