"""List queries whose scores changed between two models, with likely causes, and count texts cut by
the length limit.
"""
