"""CDE, contextual document embeddings: an encoder that reads a text after vectors of documents of
its corpus (arXiv 2410.02525).
"""
