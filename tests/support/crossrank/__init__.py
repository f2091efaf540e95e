"""A package from outside: a cross-encoder as an architecture, with its loss and its objective."""
