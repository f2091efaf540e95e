"""Import of an earlier job's records, with their provenance."""

from dataclasses import dataclass, replace

from rayembed.config.data import DatasetConfig
from rayembed.config.sources import RecordsSource
from rayembed.data.artifacts import MANIFEST, DatasetArtifact, open_artifact
from rayembed.data.parts import Part, read_records
from rayembed.data.records import Record
from rayembed.data.sources.tasks import HeldOut, RecordWriter
from rayembed.data.work_items import Result
from rayembed.errors import ArtifactError, DataError


@dataclass(frozen=True)
class EarlierPart:
    """Work item: a part of the earlier job."""

    part: Part

    @property
    def key(self) -> str:
        """Content hash of the part."""
        return self.part.digest


@dataclass(frozen=True)
class TakeRecords:
    """Task: copy a part's records into this data set.

    Records keep their ids, negatives, scores, task and origins. Instructions of the data set
    replace theirs; other rows' documents are negatives only if both allow it.
    """

    folder: str
    dataset: DatasetConfig
    held_out: HeldOut

    def __call__(self, item: EarlierPart) -> Result:
        """Report `parts`, counts and examples of rejected records."""
        writer = RecordWriter(self.folder, self.held_out)
        for record in read_records(item.part.path):
            writer.take([self._taken(record)], record.query)
        return writer.finish()

    def _taken(self, record: Record) -> Record:
        given = self.dataset
        return replace(
            record,
            dataset=given.name,
            query_instruction=given.query_instruction or record.query_instruction,
            document_instruction=given.document_instruction or record.document_instruction,
            in_batch=given.in_batch_negatives and record.in_batch,
        )


def open_earlier(source: RecordsSource) -> DatasetArtifact:
    """Open the earlier job's finished folder.

    Raises:
        DataError: it has no manifest: the job has not finished, or the folder is none of a job's.
    """
    try:
        return open_artifact(source.path)
    except ArtifactError as error:
        raise DataError(
            f"source.path = {source.path!r} has no {MANIFEST}; take the folder that a data job "
            f"printed, and wait until it has finished ({error})"
        ) from error
