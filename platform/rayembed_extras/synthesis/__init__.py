"""Synthetic pairs from a language model: prompts, validation, requests."""
