"""Which pairs stay: those whose document a weak model finds by itself."""
