"""Pruning methods with which NV-Embed makes its model smaller (arXiv 2405.17428, appendix A)."""
