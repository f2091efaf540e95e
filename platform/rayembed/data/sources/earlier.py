"""Source that takes over records of an earlier job, with their provenance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from rayembed.config.document import fingerprint
from rayembed.config.sources import Source
from rayembed.config.types import Reference
from rayembed.data.records import Record
from rayembed.data.sources.file_rows import Conversion, ResolvedDataset
from rayembed.errors import ArtifactError, DataError, StorageError

if TYPE_CHECKING:
    from rayembed.config.data import DatasetConfig
    from rayembed.data.engine.artifacts import DatasetArtifact
    from rayembed.data.engine.parts import PartItem
    from rayembed.data.engine.work_items import Result
    from rayembed.data.sources.tasks import HeldOut


class RecordsSource(Source):
    """Records that an earlier job wrote: prepared, mined, filtered or synthesised."""

    can_hold_out: ClassVar = True
    held_out_columns: ClassVar = ("id", "label", "language")
    has_records: ClassVar = True

    kind: Literal["records"] = "records"
    path: Reference
    """Folder with its `manifest.json`; provenance of rows and negatives is kept."""

    @property
    def paths(self) -> dict[str, str]:
        """Map the setting `path` to the folder of the earlier job."""
        return {"path": self.path}

    @property
    def brings_negatives(self) -> bool:
        """Assumed true, since only the records themselves show whether they have negatives."""
        return True

    def check(self, dataset: DatasetConfig) -> ResolvedDataset:
        """Find the earlier job's finished folder, and fingerprint its content.

        Raises:
            DataError: as `_opened`.
        """
        earlier = self._opened()
        content = fingerprint([earlier.fingerprint, earlier.manifest["parts"]])
        return ResolvedDataset(dataset, content)

    @property
    def draws_by_seed(self) -> bool:
        """Always false, since records are copied without any draw."""
        return False

    def convert(self, conversion: Conversion) -> list[Result]:
        """Copy the records of every Parquet part."""
        from rayembed.data.engine.parts import PartItem

        folder = conversion.writer.parts_folder
        take = TakeRecords(
            folder, conversion.dataset, conversion.held_out, indexed=conversion.indexed
        )
        items = [PartItem(part) for part in self._opened().parts]
        return conversion.run("records", take, items)

    def held_out_folder(self) -> str | None:
        """Folder of the held-out part that the earlier job excluded; None if it excluded none."""
        return self._opened().held_out_folder

    def _opened(self) -> DatasetArtifact:
        """Open the earlier job's finished folder.

        Raises:
            DataError: it has no manifest: the job has not finished, or the folder is none of a
                job's.
        """
        from rayembed.assets.store import MANIFEST
        from rayembed.data.engine.artifacts import open_artifact

        try:
            # The folder may be anyone's: nothing here may advise to remove it.
            advice = "Use the folder that a data job printed, and wait until that job has finished"
            return open_artifact(self.path, advice)
        except StorageError:
            raise
        except ArtifactError as error:
            raise DataError(
                f"source.path = {self.path!r} has no {MANIFEST} of a data job: {error}"
            ) from error


@dataclass(frozen=True)
class TakeRecords:
    """Task: copy the records of a Parquet part into this data set.

    Records keep their ids, negatives, scores, task and origins. Instructions of the data set
    replace theirs; other rows' documents are negatives only if both allow it.
    """

    folder: str
    dataset: DatasetConfig
    held_out: HeldOut
    indexed: bool = False
    """Whether to write an index of the rows."""

    def __call__(self, item: PartItem) -> Result:
        """Run the task; its result has `parts`, counts and examples of rejected records."""
        from rayembed.data.engine.parts import read_records
        from rayembed.data.sources.tasks import RecordWriter

        writer = RecordWriter(self.folder, self.held_out, indexed=self.indexed)
        column = getattr(self.dataset.held_out, "column", None)
        for record in read_records(item.part.path):
            group = getattr(record, column) if column else None
            writer.take([self._taken(record)], record.query, group=group)
        return writer.finish(item.key)

    def _taken(self, record: Record) -> Record:
        from rayembed.data.words import without_copies

        given = self.dataset
        texts = [negative.text for negative in record.negatives]
        kept = set(without_copies(texts, (record.query, *record.positives)))
        negatives = tuple(one for one in record.negatives if one.text in kept)
        return replace(
            record,
            negatives=negatives,
            negatives_copied=len(record.negatives) - len(negatives),
            dataset=given.name,
            query_instruction=given.query_instruction or record.query_instruction,
            document_instruction=given.document_instruction or record.document_instruction,
            in_batch=given.in_batch_negatives and record.in_batch,
        )
