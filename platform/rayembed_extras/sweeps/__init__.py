"""Trials of a sweep: definition, execution, results."""
