"""Names of the preparation steps."""

from typing import Literal

Step = Literal["records", "filtered", "mined", "clustered"]
"""Preparation steps in their order; also the names of their result folders."""
