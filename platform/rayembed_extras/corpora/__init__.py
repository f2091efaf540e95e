"""Corpora of contextual models: documents in whose context texts are embedded."""
