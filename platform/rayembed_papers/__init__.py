"""Reproduction of the papers with rayembed: their tables, their figures, their benchmarks."""

import logging

# What is logged here is shown where the library's own lines are.
logging.getLogger(__name__).parent = logging.getLogger("rayembed")
