"""Source of retrieval data in BEIR's layout: judgements, documents and queries in separate
files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rayembed.config.sources import Column
from rayembed.config.types import Reference
from rayembed.data.sources.cells import RowError, name_in, number_in
from rayembed.data.sources.file_rows import Conversion, FileRows
from rayembed.errors import ConfigError

if TYPE_CHECKING:
    from rayembed.config.data import DatasetConfig
    from rayembed.data.engine.work_items import Result
    from rayembed.data.sources.files import FilePiece

log = logging.getLogger(__name__)

NOT_RELEVANT = "not relevant"


class BeirSource(FileRows):
    """Retrieval data in BEIR's layout: documents, queries, and the judgements that join
    them.

    `path` holds the judgements, the other files lie where they are named, relative to `data.root`.
    `language` is a column of the queries.
    """

    columns_read: ClassVar = ("query_id", "document_id", "score")
    tolerated: ClassVar = frozenset({NOT_RELEVANT})

    kind: Literal["beir"] = "beir"
    corpus: Reference
    """Corpus files with `_id`, `title`, `text`."""
    queries: Reference
    """Query files with `_id`, `text`."""
    query_id: Column = "query-id"
    document_id: Column = "corpus-id"
    score: Column = "score"
    min_score: float = 1.0
    """Minimum score of a positive judgement."""
    document: Column = "title+text"
    """Columns of the corpus that form a document."""
    query: Column = "text"
    """Columns of the queries that form a query."""

    @property
    def columns(self) -> dict[str, str]:
        """Map each setting to the column of the judgements that it names."""
        return {name: column for name, column in super().columns.items() if name != "language"}

    @property
    def paths(self) -> dict[str, str]:
        """Map the name of each path setting to its path."""
        return {"path": self.path, "corpus": self.corpus, "queries": self.queries}

    def check_files(self, dataset: DatasetConfig, files: Mapping[str, Sequence[FilePiece]]) -> None:
        """Check that all files have the columns that the settings name."""
        super().check_files(dataset, files)
        self._check_texts(files["corpus"][0], files["queries"][0])

    def _check_texts(self, corpus: FilePiece, queries: FilePiece) -> None:
        """Check that corpus and queries have ids and text columns; `title` may be missing if
        `document` has its default.
        """
        from rayembed.data.sources.beir_join import IDS
        from rayembed.data.sources.rows import check_columns

        for setting, piece in (("corpus", corpus), ("queries", queries)):
            try:
                check_columns(piece, {f"source.{setting}: the id": IDS[1]})
            except ConfigError:
                check_columns(piece, {f"source.{setting}: the id": IDS[0]})
        # By its value: in settings that a run printed of itself, every field is named.
        default = type(self).model_fields["document"].default
        lenient = ["source.document"] if self.document == default else []
        check_columns(corpus, {"source.document": self.document}, lenient)
        told = {"source.query": self.query, "source.language": self.language}
        check_columns(queries, {name: column for name, column in told.items() if column})

    @property
    def draws_by_seed(self) -> bool:
        """Always false, since the conversion draws nothing at random."""
        return False

    def convert(self, conversion: Conversion) -> list[Result]:
        """Shuffle judgements, queries and documents into buckets by query, and make the records of
        each bucket.
        """
        from rayembed.assets.storage import join
        from rayembed.data.engine.shuffle import Bucket, number_of_buckets
        from rayembed.data.sources import beir_join as tasks

        dataset, writer, files = conversion.dataset, conversion.writer, conversion.files
        folder = join(writer.working_folder, "scattered")
        size = sum(piece.size for piece in files["path"])
        buckets = number_of_buckets(size, tasks.BYTES_OF_JUDGEMENTS_PER_BUCKET)
        shared = tasks.Scattering(writer.parts_folder, folder, dataset, buckets, self.language)
        scatter = tasks.ScatterJudgements(shared, tuple(self.columns.values()), self.judgement)
        judged = conversion.prepare("judgements", scatter, files["path"])
        needed = tasks.merge_needed(folder, [result["needed"] for result in judged])
        send = tasks.ScatterTexts(shared, self.query)
        queries = conversion.prepare("queries", send, files["queries"])
        send = tasks.ScatterTexts(shared, self.document, needed)
        documents = conversion.prepare("documents", send, files["corpus"])
        task = tasks.ConvertJudged(
            shared,
            conversion.forwarded("judgements", join(folder, "judgements"), judged, buckets),
            conversion.forwarded("queries", join(folder, "queries"), queries, buckets),
            conversion.forwarded("documents", join(folder, "documents"), documents, buckets),
            conversion.held_out,
        )
        made = conversion.run("records", task, [Bucket(number) for number in range(buckets)])
        lost = {
            name: sum(result[name] for result in (*queries, *documents))
            for name in tasks.LOST_TEXTS
        }
        if any(lost.values()):
            log.warning(
                "data set %s: in its corpus and queries %d rows could not be read and %d have no "
                "id; judgements that refer to these rows are rejected",
                *(dataset.name, *lost.values()),
            )
        return [*judged, {**made[0], **lost}, *made[1:]]

    def judgement(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """Return the query id and the document id of a judgement whose score is high
        enough.

        Raises:
            RowError: it is not, or the row has no ids.
        """
        query, document = name_in(row, self.query_id), name_in(row, self.document_id)
        if query is None or document is None:
            raise RowError("the query id or the document id is missing")
        if number_in(row, self.score) < self.min_score:
            raise RowError(NOT_RELEVANT)
        return query, document
