"""Run a model over many texts to embed them."""
