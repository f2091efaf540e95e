"""Removal of rows whose text nearly equals that of another row."""
