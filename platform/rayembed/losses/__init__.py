"""Pure functions of embeddings. Knows no process groups."""
