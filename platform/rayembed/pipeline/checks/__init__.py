"""Checks before a run starts, one module for each thing that they need: files, the network, a
model.
"""
