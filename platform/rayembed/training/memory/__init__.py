"""Memory of a stage: plan it, measure it, and react when it runs out."""
