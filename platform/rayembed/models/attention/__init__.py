"""Attention kernels: texts without padding, and short texts on CPUs."""
