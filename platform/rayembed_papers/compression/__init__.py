"""NV-Embed's appendix A at a small size: pruning, recovery and quantisation, measured."""
