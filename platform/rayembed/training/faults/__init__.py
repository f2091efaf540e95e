"""Hanging, failing and leaving workers."""
