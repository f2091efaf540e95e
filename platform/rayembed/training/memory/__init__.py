"""Memory of a stage: planning, measuring, and running out of it."""
