"""The pruning methods that NV-Embed uses to make its model smaller (arXiv 2405.17428, A)."""
