"""How much unrelated text behind every text lowers a model's scores (Causal2Vec)."""
