"""Models under evaluation over a pool of workers."""
