"""Measure NV-Embed's appendix A at a small size: pruning, recovery training and quantisation."""
