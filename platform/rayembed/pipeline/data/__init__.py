"""Jobs that prepare data."""
