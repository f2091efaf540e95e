"""Attention functions for texts without padding, and for short texts on CPUs."""
