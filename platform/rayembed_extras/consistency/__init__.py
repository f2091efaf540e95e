"""The consistency filter: keeps pairs whose document a weak model finds by itself."""
