"""Base classes of sources whose data are files of rows, and the inputs of their conversion."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, get_args

import xxhash

from rayembed.config.document import fingerprint
from rayembed.config.sources import Column, FileSource, Source
from rayembed.config.types import has_content
from rayembed.data.records import Negative, Record, reject_reason
from rayembed.data.sources.cells import RowError
from rayembed.data.words import without_copies
from rayembed.errors import ConfigError

if TYPE_CHECKING:
    from rayembed.config.data import DatasetConfig
    from rayembed.data.engine.artifacts import ArtifactWriter, PipelineContext
    from rayembed.data.engine.exchange import Buckets
    from rayembed.data.engine.work_items import Result, Task, WorkItem
    from rayembed.data.sources.files import FilePiece
    from rayembed.data.sources.rows import Row
    from rayembed.data.sources.tasks import HeldOut


@dataclass(frozen=True)
class ResolvedDataset:
    """A data set whose source has been found and checked, with absolute paths."""

    dataset: DatasetConfig
    """Settings with the source's paths resolved below the root."""
    content: str
    """Content fingerprint of the source."""
    files: Mapping[str, Sequence[FilePiece]] = field(default_factory=dict)
    """Setting → pieces of its files, for sources of files."""
    unread: Sequence[str] = ()
    """Columns of the files at `path` that no setting reads."""


@dataclass(frozen=True)
class Conversion:
    """Inputs and functions that a source uses to make the records of a data set."""

    context: PipelineContext
    dataset: DatasetConfig
    files: Mapping[str, Sequence[FilePiece]]
    held_out: HeldOut
    writer: ArtifactWriter
    """Writer of the folder whose `parts_folder` gets the records."""
    indexed: bool = False
    """Whether held-out rows are chosen from the records: each task then writes a `RowIndex`."""

    def run(self, what: str, task: Task, items: Sequence[WorkItem]) -> list[Result]:
        """Run a task that makes records on all items, reusing results of an earlier try.

        Args:
            what: names the task within the folder and in the log.
        """
        return self._run(self.writer.folder, what, task, items)

    def prepare(self, what: str, task: Task, items: Sequence[WorkItem]) -> list[Result]:
        """Run a task whose files only later tasks read, so that they go into `working_folder`."""
        return self._run(self.writer.working_folder, what, task, items)

    def forwarded(
        self, what: str, folder: str, results: Sequence[Result], num_buckets: int
    ) -> Buckets:
        """Return the buckets of the rows that tasks wrote into `folder` and reported as
        `scattered`.
        """
        from rayembed.data.engine.exchange import Buckets, forward
        from rayembed.data.engine.shuffle import Route

        names = tuple(name for result in results for name in result["scattered"])
        buckets = Buckets(folder, len(names), Route.to(num_buckets), names)
        forward(buckets, f"{what} {self.dataset.name}", self.context.execute)
        return buckets

    def without_overlap(self, path: str) -> str:
        """Copy a Parquet file without the rows whose `text` has a benchmark text, and return the
        copy's path; the given path if `cleaning.overlap` is not set.

        For texts that a source draws from: those of benchmarks are never drawn, so that others
        come in their place.

        Raises:
            AssetError, ConfigError, DataError: the evaluation texts cannot be had.
        """
        from rayembed.data.cleaning.overlap import drop_overlap

        name, overlap = self.dataset.name, self.dataset.cleaning.overlap
        if overlap is None:
            return path
        working, root = self.writer.working_folder, self.context.root
        return drop_overlap(working, name, overlap, root, path)

    def _run(self, folder: str, what: str, task: Task, items: Sequence[WorkItem]) -> list[Result]:
        from rayembed.data.engine.work_items import run_resumable

        named = f"{what} {self.dataset.name}"
        return run_resumable(folder, named, task, items, self.context.execute)


class FileRows(FileSource, Source):
    """Base class of sources of files in which each row becomes records independently.

    A member names its columns in `columns_read` and makes the `records` of a row.
    """

    columns_read: ClassVar[tuple[str, ...]] = ()
    """Settings that name columns of the files at `path`, in addition to `language`."""
    takes_texts: ClassVar[bool] = False
    """Whether text files count as rows with the columns `id`, `title` and `text`."""

    @property
    def columns(self) -> dict[str, str]:
        """Map each setting to the column of the files at `path` that it names."""
        named = ((name, getattr(self, name)) for name in (*self.columns_read, "language"))
        return {name: column for name, column in named if isinstance(column, str)}

    @property
    def paths(self) -> dict[str, str]:
        """Map the name of each path setting to its path; relative paths start from `data.root`."""
        return {"path": self.path}

    @property
    def draws_by_seed(self) -> bool:
        """Whether the conversion depends on the job's seed; false if each row becomes records
        independently.
        """
        return type(self).convert is not FileRows.convert

    def records(self, dataset: DatasetConfig, row: Row) -> list[Record]:
        """Make the records of a row, usually one; to be implemented by each source.

        Raises:
            RowError: there is none; the message is the reason, and counts rows in the manifest.
        """
        raise TypeError(
            f"{type(self).__name__} does not define `records`, which makes the records of a row"
        )

    def find(self, *, versions: bool = True) -> dict[str, tuple[FilePiece, ...]]:
        """Map the name of each path setting to the pieces of its files; see
        `data.sources.files.list_pieces`.
        """
        from rayembed.data.sources.files import list_pieces

        listed = partial(
            list_pieces,
            delimiter=self.delimiter,
            encoding=self.encoding,
            quotes=self.quotes,
            versions=versions,
            texts=self.takes_texts,
        )
        return {name: tuple(listed(path)) for name, path in self.paths.items()}

    def check_files(self, dataset: DatasetConfig, files: Mapping[str, Sequence[FilePiece]]) -> None:
        """Check that each file has all the columns that the settings name.

        Raises:
            ConfigError: one has not, the message names the nearest column; or the files are those
                of a retrieval set in BEIR's layout, which are no rows of one kind.
        """
        from rayembed.data.sources.rows import check_columns, first_pieces

        setting = f"data.datasets.{dataset.name}"
        stems = {piece.name.partition(".")[0] for piece in files["path"]}
        if stems >= {"corpus", "queries"}:
            raise ConfigError(
                f"{setting}.source.path = {self.path!r} is a folder with a corpus and queries, a "
                "retrieval set in BEIR's layout, whose files hold rows of different kinds: name "
                f"one of its files, or set {setting}.source.kind=beir with corpus, "
                "queries and path (of the judgements)"
            )
        columns = {f"{setting}.source.{name}": column for name, column in self.columns.items()}
        if (column := getattr(dataset.held_out, "column", None)) is not None:
            columns[f"{setting}.held_out.column"] = column
        fields = type(self).model_fields.items()
        optional = [
            f"{setting}.source.{name}"
            for name, field in fields
            if type(None) in get_args(field.annotation)
        ]
        for piece in first_pieces(files["path"]):
            check_columns(piece, columns, optional=optional)

    def check(self, dataset: DatasetConfig) -> ResolvedDataset:
        """Find the files and check their columns."""
        from rayembed.data.sources.unread import unread_columns

        files = self.find()
        self.check_files(dataset, files)
        told = {n: [[p.name, p.start, p.version] for p in ps] for n, ps in files.items()}
        unread = unread_columns(files["path"], self.columns_looked_up(dataset))
        return ResolvedDataset(dataset, fingerprint(told), files, unread)

    def columns_looked_up(self, dataset: DatasetConfig) -> list[str]:
        """List the columns to read from the files at `path`, including the column of held-out
        groups.
        """
        column = getattr(dataset.held_out, "column", None)
        return [*self.columns.values(), *([] if column is None else [column])]

    def convert(self, conversion: Conversion) -> list[Result]:
        """Make the records of every piece independently."""
        return self.convert_rows(conversion, partial(self.records, conversion.dataset))

    def convert_rows(
        self, conversion: Conversion, make: Callable[[Row], list[Record]]
    ) -> list[Result]:
        """Make the records of every piece by the picklable function `make`, row by row."""
        from rayembed.data.sources.tasks import ConvertRows

        dataset, pieces = conversion.dataset, conversion.files["path"]
        task = ConvertRows(
            conversion.writer.parts_folder,
            conversion.held_out,
            tuple(self.columns_looked_up(dataset)),
            make,
            source_bytes=sum(piece.size for piece in pieces),
            indexed=conversion.indexed,
            column=getattr(dataset.held_out, "column", None),
        )
        return conversion.run("records", task, pieces)


class NamedRows(FileRows):
    """Base class of sources of files whose rows may have an id column."""

    id: Column | None = None
    """Column of a row's id, which distinguishes equal rows and decides samples; None: the row's
    content identifies it."""


def record_of(
    dataset: DatasetConfig,
    query: str | None,
    positives: Sequence[str],
    negatives: Sequence[str] = (),
    *,
    origin: Sequence[str],
    rule: str = "given",
    label: str | None = None,
    language: str | None = None,
    instruction: str | None = None,
    name: str | None = None,
) -> Record:
    """Build a record from a query, positives and negatives.

    Texts without a visible character, positives equal to the query, and negatives that are the
    query or a positive but for case and white space are dropped, the latter counted. Equal texts
    get equal ids if their class and language are equal, too.

    Args:
        rule: how the negatives were chosen.
        instruction: put in place of the data set's `query_instruction`.
        name: of the record within the data set; None: its content names it.

    Raises:
        RowError: there is none; the message says why.
    """
    reason = reject_reason({"query": query, "positives": positives})
    if reason or query is None:
        raise RowError(reason or "no query")
    kept = [t for t in dict.fromkeys(positives) if t != query and has_content(t)]
    given = [t for t in dict.fromkeys(negatives) if has_content(t)]
    wrong = without_copies(given, (query, *kept))
    named = {"label": label, "language": language}
    known = {name: value for name, value in named.items() if value is not None}
    identity = [query, kept, wrong, instruction, *([known] if known else [])]
    content = json.dumps(identity, ensure_ascii=False).encode()
    return Record(
        id=f"{dataset.name}/{name or xxhash.xxh3_128_hexdigest(content)}",
        query=query,
        positives=tuple(kept),
        negatives=tuple(Negative(text, rule=rule) for text in wrong),
        dataset=dataset.name,
        task=dataset.task,
        query_instruction=instruction or dataset.query_instruction,
        document_instruction=dataset.document_instruction,
        in_batch=dataset.in_batch_negatives,
        label=label,
        language=language,
        origin=tuple(origin),
        negatives_copied=len(given) - len(wrong),
    )
