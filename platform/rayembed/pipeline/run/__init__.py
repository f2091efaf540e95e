"""Run a training from its settings to its report, in one process or on Ray."""
