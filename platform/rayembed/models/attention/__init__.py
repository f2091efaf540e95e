"""Attention over texts without padding, and over short texts on CPUs."""
