"""CDE: an encoder that reads a text after vectors of its corpus (arXiv 2410.02525)."""
