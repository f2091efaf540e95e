"""Checkpoints, weights and exports of a stage."""
