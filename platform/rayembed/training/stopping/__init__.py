"""Stopping a training run."""
