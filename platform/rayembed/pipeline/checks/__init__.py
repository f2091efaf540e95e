"""Checks before a run starts, one module for each resource that they need: files, the network, a
model.
"""
