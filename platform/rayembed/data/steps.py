"""The steps of preparation, by name."""

from typing import Literal

Step = Literal["records", "filtered", "mined", "clustered"]
"""In the order in which they are done; also the folders of their results."""
