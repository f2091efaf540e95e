"""Memory that a stage needs, keeps and runs out of."""
