"""Models and data by reference: a path, the hub, object storage, a pinned package."""
