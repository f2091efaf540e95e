"""The guard of a fine-tune: what it may cost elsewhere, and mixtures with its base."""

from typing import Annotated, Literal

from pydantic import Field

from rayembed.config.settings import Settings
from rayembed.config.types import Distinct

SAMPLE = "sample://"
"""How references of a sample's files begin."""

_Share = Annotated[float, Field(gt=0.0, lt=1.0)]


class GuardConfig(Settings):
    """After training, the model before and after it and mixtures of both are scored; kept is the
    one that gains most on own data among those that lose less elsewhere.

    Own data are the held-out parts of the data sets and `evaluation.own_sets` but for those of a
    sample; all other tasks of the run are general ones.
    """

    shares: Distinct[_Share] = (0.75, 0.5, 0.25)
    """Shares of the trained model in the mixtures."""
    method: Literal["linear", "slerp"] = "linear"
    """How weights are mixed with those before training, θ₀. `linear`: θ₀ + share · (θ - θ₀)
    (WiSE-FT, arXiv 2109.01903; task arithmetic of one task). `slerp`: along the arc between them,
    tensor by tensor."""
    own_sets: Distinct[str] | None = None
    """Names of the `evaluation.own_sets` that are own data; None: all but those of a sample
    (`sample://…`), which benchmarks are made of."""
    most_loss: float | None = Field(default=None, ge=0.0, le=1.0)
    """How much lower the mean score of general tasks may be than before training, of 1; None: less
    than the gain on own data, and less than 0.03."""
    take: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of the trained model that is kept whatever the scores say, 1 being the trained model
    itself; None: the scores decide. A run that is done takes it without training again."""

    @property
    def mixed(self) -> tuple[float, ...]:
        """Shares of the mixtures that are made: that which is taken, or all candidates."""
        if self.take is None:
            return self.shares
        return (self.take,) if self.take < 1 else ()
