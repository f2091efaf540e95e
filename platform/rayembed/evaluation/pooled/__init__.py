"""Evaluation of models with a pool of workers."""
