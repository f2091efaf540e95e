"""Completion of the command in shells."""
