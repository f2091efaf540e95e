"""Where models and data come from: a path, the hub, object storage, a pinned package."""
