"""Settings of a run: identity (what it is) and placement (where it runs). Imports neither torch nor
Ray.
"""
