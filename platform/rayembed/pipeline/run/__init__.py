"""Training run from its settings to its report, and its runtime."""
