"""A training run from its settings to its report, and where it is done."""
