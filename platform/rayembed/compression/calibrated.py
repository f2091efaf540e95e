"""Settings that ways with calibration texts share."""

from typing import ClassVar

from pydantic import PositiveInt

from rayembed.compression.contract import Compression


class Calibrated(Compression):
    """A way that looks at what calibration texts do in the model."""

    needs_texts: ClassVar[bool] = True

    minimum_texts: PositiveInt = 128
    """Minimum calibration texts; with fewer the compression is refused. They should be of the kind
    that the model embeds, queries and documents."""

    @property
    def fewest_texts(self) -> int:
        """`minimum_texts`."""
        return self.minimum_texts
