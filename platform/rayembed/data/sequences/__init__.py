"""Texts as sequences of tokens for masked-language modelling: packed, ordered, masked."""
