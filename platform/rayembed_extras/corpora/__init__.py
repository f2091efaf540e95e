"""Corpora of contextual models: choose the documents whose vectors give the model its context."""
