"""Settings of data steps: steps that make new records, removals while cleaning."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from rayembed.config.settings import Settings
from rayembed.config.table import SettingsTable


class DataStep(Settings):
    """Settings of a step. A data set asks for it by a setting that is named as its kind.

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
        """What the step does with hard negatives that rows already have; empty: nothing."""
        return ""

    @property
    def models(self) -> Mapping[str, str]:
        """Setting → asset reference of the models that it loads."""
        return {}

    @property
    def draws_by_seed(self) -> bool:
        """Whether the records depend on the run's seed."""
        return True

    def treatment(self, write: Callable[[str], str]) -> str:
        """Description of the finished step for the model card.

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
        """Check that a language model's endpoint can be reached, as far as this machine can see.

        Args:
            setting: where the step stands in the settings, for messages.
            storage: where answers of earlier jobs lie.

        Raises:
            ConfigError: it cannot.
        """

    def make(self, context: Any, dataset: Any, parent: Any, held_out: Any) -> Any:
        """Make or reuse the folder of the step's records, a `DatasetArtifact`.

        Args:
            context: storage, seed and how tasks are executed, a `PipelineContext`.
            dataset: the data set's settings, a `DatasetConfig`.
            parent: the records that it begins with, a `DatasetArtifact`.
            held_out: texts that no row may have, a `HeldOut` of `data.sources.tasks`.
        """
        raise TypeError(f"{type(self).__name__} makes no records")


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
    """Folders of a data set below the storage's `data`, starting with its converted records."""
    return ("records", *(step.folder for step in data_steps()))


class Cleaner(Settings):
    """Settings of a removal of rows. `cleaning` asks for it by a setting that is named as its kind.

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
        """Find and list the rows to remove, a `RemovedRows` of `data.cleaning.rows`.

        Args:
            writer: of the records, an `ArtifactWriter`, whose folder keeps the listing.
            parts: all rows.
            keep: (rows,) bool of the rows to look at.
            id_hash: (rows,) int64 of the rows' ids.
            execute: how tasks are executed.
        """
        raise TypeError(f"{type(self).__name__} removes nothing")


CLEANERS = SettingsTable("rayembed.cleaners", Cleaner, ())
"""Removals that other packages add. Their modules import what is slow to import inside functions.
"""
