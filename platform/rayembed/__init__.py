"""rayembed trains and evaluates text-embedding models on Ray."""
