"""Settings of a compression: the model, the methods, and the tasks that score the variants."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PositiveInt, model_validator

from rayembed.config.document import Document
from rayembed.config.evaluation import EvaluationPlacement, ModelUnderTest
from rayembed.config.own_sets import Scores
from rayembed.config.settings import Settings
from rayembed.config.sources import Column
from rayembed.config.types import FileName, Reference, Seed
from rayembed_extras.compression.contract import Compression
from rayembed_extras.compression.settings import COMPRESSIONS

# Members import the base class, so that the table is read here and not where that stands.
if TYPE_CHECKING:
    AnyCompression = Compression
else:
    AnyCompression = COMPRESSIONS.union()


class CalibrationConfig(Settings):
    """Settings of the calibration texts, which all methods share."""

    path: Reference | None = None
    """A file, folder, prefix or pattern of Parquet, JSONL, CSV or TSV files. None: the batch plan
    of the run that trained the model, whose `run.yaml` stands in the run's folder or in MLflow."""
    documents: Column | None = "text"
    """Column of documents in the files at `path`; None: there are none."""
    queries: Column | None = None
    """Column of queries in the files at `path`; None: there are none."""
    number: PositiveInt = 256
    """Number of texts to draw."""
    seed: Seed = 0
    """Seed of the draw."""


class SpeedConfig(Settings):
    """Settings of the speed measurement of each variant."""

    documents: PositiveInt = 256
    """Number of calibration documents embedded in a round; all if there are fewer, and texts of any
    role if there are none."""
    rounds: PositiveInt = 3
    """Number of rounds; each measures every variant once in its own process, and the fastest
    counts."""
    threads: PositiveInt | None = None
    """Threads of a process; None: the number of the machine's cores."""


class CompressionPlacement(EvaluationPlacement):
    """Where a compression runs and stores its results. Nothing here changes a variant."""

    experiment: str = "rayembed-compression"
    """MLflow experiment."""
    registered_model: str | None = None
    """Name in MLflow's registry under which each variant becomes a version; None:
    no registration."""


class CompressionRun(Scores, Document):
    """Complete settings of a compression: a model, the methods, and the tasks that score each
    variant.
    """

    name: FileName | None = None
    """Name of the run and of the folder of its variants; None: `compressed-` and
    the fingerprint."""
    model: ModelUnderTest
    """The model; its number type, lengths and prompts apply to every variant."""
    ways: Annotated[tuple[AnyCompression, ...], Field(min_length=1)]
    """Compression methods, each applied to the original model."""
    calibration: CalibrationConfig = CalibrationConfig()
    speed: SpeedConfig | None = SpeedConfig()
    """None: speed and memory are not measured."""
    placement: CompressionPlacement = CompressionPlacement()

    def identity(self, write: Callable[[str], str] | None = None) -> dict[str, Any]:
        """Settings that decide variants and scores, without the settings of the speed
        measurement.
        """
        return {name: value for name, value in super().identity(write).items() if name != "speed"}

    @property
    def title(self) -> str:
        """Name of the compression in paths and reports."""
        return self.name or f"compressed-{self.fingerprint}"

    @model_validator(mode="after")
    def _no_way_twice(self) -> "CompressionRun":
        labels = [way.label for way in self.ways]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(
                f"two compression methods have the label {twice[0]!r}, which names the output; "
                "run variants with equal labels in separate runs"
            )
        return self
