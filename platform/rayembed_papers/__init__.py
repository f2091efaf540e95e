"""Reproduce the papers with rayembed: their tables, figures and benchmarks."""

import logging

# What is logged here is shown where the library's own lines are.
logging.getLogger(__name__).parent = logging.getLogger("rayembed")
