"""Consistency filtering: keeps pairs whose document a weak model retrieves."""
