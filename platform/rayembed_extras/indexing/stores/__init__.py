"""Vector stores, one module for each kind: its settings and its client."""
