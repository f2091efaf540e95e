"""Consistency filter: keep pairs whose document a small model retrieves for the query."""
