"""Read training rows from mteb tasks: pairs, graded sentences or texts with classes, by the task's
type.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from rayembed.config.sources import DEFAULT_REJECTED_SHARE, Source
from rayembed.data.sources.classes import ClassesSource, LabelForm
from rayembed.data.sources.file_rows import Conversion, FileRows, ResolvedDataset
from rayembed.data.sources.pairs import PairsSource
from rayembed.data.sources.sts import STSSource
from rayembed.errors import ArtifactError, DataError

if TYPE_CHECKING:
    from rayembed.config.data import DatasetConfig
    from rayembed.data.engine.work_items import Result
    from rayembed_papers.sources.mteb_tasks import SplitOfTask

_SIMILAR = 0.8
"""Relative similarity threshold within a task's score range: at least 4 of 5 (NV-Embed, section
4.2)."""


class MtebSource(Source):
    """A split of an mteb task, converted to records by the task's type."""

    tolerated: ClassVar = STSSource.tolerated | ClassesSource.tolerated

    kind: Literal["mteb"] = "mteb"
    task: str
    """Name of a retrieval, reranking, pair, sts, classification, clustering or bitext task."""
    split: str = "train"
    """Split of the task's data; evaluation splits are refused."""
    subset: str | None = None
    """Language or subset of the task; None: all."""
    names: dict[str, str] = Field(default_factory=dict)
    """Text of each numeric label of a task without label texts; see `ClassesSource`."""
    label_form: LabelForm = "example"
    """Form of positives and negatives; see `ClassesSource`."""
    num_negatives: PositiveInt = 7
    """Negatives from other classes for each row; see `ClassesSource`."""
    max_rejected_share: float = Field(default=DEFAULT_REJECTED_SHARE, ge=0.0, le=1.0)

    @property
    def place(self) -> str:
        """Name of the task, for messages."""
        return self.task

    @property
    def summary(self) -> str:
        """Split and task in a few words, for tables."""
        return f"{self.split} of mteb's {self.task}"

    @property
    def brings_negatives(self) -> bool:
        """Always True: the type of an mteb task is known only after loading it."""
        return True

    def check_names(self, setting: str) -> None:
        """Check that mteb has the task."""
        from rayembed.evaluation.mteb_names import check_task

        check_task(f"{setting}.task", self.task)

    def check(self, dataset: DatasetConfig) -> ResolvedDataset:
        """Load the task and check its split."""
        from rayembed_papers.sources.mteb_tasks import data_fingerprint

        return ResolvedDataset(dataset, data_fingerprint(self._split))

    def convert(self, conversion: Conversion) -> list[Result]:
        """Write the split as Parquet files, and convert them as their kind of source does."""
        from rayembed.assets.storage import join
        from rayembed.data.engine.parts import remedy
        from rayembed.data.engine.work_items import in_process
        from rayembed.data.sources.files import list_pieces
        from rayembed_papers.sources.mteb_tasks import StageTask

        folder = join(conversion.writer.working_folder, "staged")
        # In this process, where the check has loaded the task.
        here = replace(conversion, context=replace(conversion.context, execute=in_process))
        here.prepare("stage", StageTask(folder), [self._split])
        source = self._of_files(folder)
        try:
            listed = list_pieces(folder)
        except DataError as error:
            raise ArtifactError(f"{error}. {remedy(f'{folder}/')}") from error
        pieces = [replace(piece, origins="origin", made=True) for piece in listed]
        dataset = conversion.dataset.model_copy(update={"source": source})
        return source.convert(replace(conversion, dataset=dataset, files={"path": pieces}))

    @property
    def _split(self) -> SplitOfTask:
        from rayembed_papers.sources.mteb_tasks import SplitOfTask

        return SplitOfTask(self.task, self.split, self.subset)

    def _of_files(self, folder: str) -> FileRows:
        """Return the source that reads the files to which the split was written."""
        from rayembed_papers.sources.mteb_tasks import kind_of_rows

        common: dict[str, Any] = {
            "path": folder,
            "max_rejected_share": self.max_rejected_share,
            "language": "language",
        }
        kind, lowest, highest = kind_of_rows(self._split)
        match kind:
            case "pairs" | "translations":
                return PairsSource(
                    positive="positives",
                    negatives="negatives",
                    both_directions=kind == "translations",
                    **common,
                )
            case "sts":
                least = lowest + _SIMILAR * (highest - lowest)
                return STSSource(first="first", second="second", min_score=least, **common)
            case "alike":
                return STSSource(first="first", second="second", min_score=1.0, **common)
            case "classes" | "clusters":
                return ClassesSource(
                    names=self.names,
                    label_form=self.label_form,
                    num_negatives=self.num_negatives,
                    **common,
                )
