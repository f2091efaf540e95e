"""Pairs that a language model writes: prompts, validation, requests."""
