"""The consistency filter: keeps pairs whose document a weak model retrieves."""
