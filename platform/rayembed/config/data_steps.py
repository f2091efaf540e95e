"""Base classes for settings of data steps, which make new records, and of cleaners, which remove
rows.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from rayembed.config.settings import Settings
from rayembed.config.table import SettingsTable


class DataStep(Settings):
    """Base class for the settings of a step that makes new records, such as mining. A data set asks
    for it by a setting that is named as its kind.

    Base class of the members of `STEPS`. Every step takes a row for a query and its positives.
    """

    kind: ClassVar[str]
    """Name in the table and of the data set's setting."""
    folder: ClassVar[str]
    """Folder of its results below the storage's `data`."""
    after: ClassVar[str] = "mining"
    """Name of the preceding step: `records`, the cleaned rows, or one of this package's steps."""
    heading: ClassVar[str]
    """Heading of its column in the table of a dry run."""
    least: ClassVar[tuple[str, ...]] = ()
    """Required settings, as arguments of `--set`, for messages."""

    @property
    def summary(self) -> str:
        """Short description of the step."""
        return self.kind

    @property
    def of_negatives(self) -> str:
        """Describe what the step does with hard negatives already in the rows; empty if it does
        nothing.
        """
        return ""

    @property
    def models(self) -> Mapping[str, str]:
        """Map settings to the asset references of the models that the step loads."""
        return {}

    @property
    def draws_by_seed(self) -> bool:
        """Whether the run's seed changes the records that the step makes."""
        return True

    def treatment(self, write: Callable[[str], str]) -> str:
        """Describe the finished step for the model card.

        Args:
            write: gives the text of a reference.
        """
        return self.summary

    def check_fits(self, dataset: Any) -> None:
        """Check that the step is compatible with the data set's other settings.

        Args:
            dataset: a `DatasetConfig`.

        Raises:
            ValueError: it does not; the message says what to set.
        """

    def check(self, setting: str) -> None:
        """Check that the step's models are downloaded and can be loaded.

        Args:
            setting: where the step stands in the settings, for messages.

        Raises:
            AssetError, ArtifactError: one cannot; the message begins with its setting.
        """

    def check_endpoint(self, setting: str, storage: str) -> None:
        """Check that this machine can reach the endpoint of a language model that the step
        uses.

        Args:
            setting: where the step stands in the settings, for messages.
            storage: where answers of earlier jobs lie.

        Raises:
            ConfigError: it cannot.
        """

    def make(self, context: Any, dataset: Any, parent: Any, held_out: Any) -> Any:
        """Make the step's records in their folder, or reuse existing ones; return a
        `DatasetArtifact`.

        Args:
            context: storage, seed and how tasks are executed, a `PipelineContext`.
            dataset: the data set's settings, a `DatasetConfig`.
            parent: the records that it begins with, a `DatasetArtifact`.
            held_out: texts that no row may have, a `HeldOut` of `data.sources.tasks`.
        """
        raise TypeError(f"{type(self).__name__} does not implement the method `make`")


STEPS = SettingsTable(
    "rayembed.data_steps",
    DataStep,
    (
        "rayembed.config.mining:MiningConfig",
        "rayembed.config.mining:ClusterConfig",
    ),
)
"""Steps of a data set. Their modules import what is slow to import inside functions."""


@cache
def data_steps() -> tuple[type[DataStep], ...]:
    """All steps, in execution order."""
    known: list[type[Any]] = list(STEPS.classes().values())
    places = ["records", *(step.kind for step in known[: len(STEPS.built_in)])]
    return tuple(
        sorted(known, key=lambda it: places.index(it.kind if it.kind in places else it.after))
    )


def step_folders() -> tuple[str, ...]:
    """Folder names of a data set's steps in the storage's `data`, in execution order from `records`
    on.
    """
    return ("records", *(step.folder for step in data_steps()))


class Cleaner(Settings):
    """Base class for the settings of a cleaning method that removes rows. `cleaning` asks for it by
    a setting that is named as its kind.

    Base class of the members of `CLEANERS`. Removals look at what exact duplicates leave, and are
    done before texts of benchmarks are looked for and samples are drawn.
    """

    kind: ClassVar[str]
    """Name in the table and of the setting."""
    reason: ClassVar[str]
    """Reason for removing its rows, for manifests and listings."""

    def check(self, setting: str) -> None:
        """Check that the required packages are installed.

        Args:
            setting: where it stands in the settings, for messages.

        Raises:
            ConfigError: one is not.
        """

    def find(self, writer: Any, parts: Sequence[Any], keep: Any, id_hash: Any, execute: Any) -> Any:
        """Select the rows to remove and write their list; return a `RemovedRows` of
        `data.cleaning.rows`.

        Args:
            writer: of the records, an `ArtifactWriter`, whose folder keeps the listing.
            parts: all rows.
            keep: (rows,) bool of the rows to look at.
            id_hash: (rows,) int64 of the rows' ids.
            execute: how tasks are executed.
        """
        raise TypeError(f"{type(self).__name__} does not implement the method `find`")


CLEANERS = SettingsTable("rayembed.cleaners", Cleaner, ())
"""Removals that other packages add. Their modules import what is slow to import inside functions.
"""
