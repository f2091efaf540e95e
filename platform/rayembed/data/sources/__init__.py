"""Data sources (files, the hub, mteb, samples) and their conversion to records."""
