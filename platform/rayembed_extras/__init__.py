"""Optional features, each in a package of its own that the library does not import."""

import logging

# What is logged here is shown where the library's own lines are.
logging.getLogger(__name__).parent = logging.getLogger("rayembed")
