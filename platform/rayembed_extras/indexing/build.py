"""Embed a corpus into a store, or bring an index up to date; a job that was killed goes on.

    indexes/<name>/index.json                      the record, see `manifest`
                   <table>/ledger/                 rows that the store has, see `ledger`
                           golden/                 vectors for checks of a model without a proof
                           working/<fingerprint>/  files of the job at work; removed at its end

Documents are read and sent to parts by the hash of their ids, each part is compared with its
ledger, and what is new or changed is embedded and written. Each step may be repeated. A table that
has grown gets more parts (`growth`).
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

from rayembed.assets.folder_formats import format_of
from rayembed.assets.json_files import read_json
from rayembed.assets.storage import join, remove_folder
from rayembed.config.backbone import Dtype
from rayembed.config.data_run import DataRun
from rayembed.config.document import fingerprint
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.exchange import exchange
from rayembed.data.engine.parts import remedy
from rayembed.data.engine.work_items import Execute, Needs, Result, Task, run_resumable, run_tasks
from rayembed.display.progress import enter, overview
from rayembed.errors import ArtifactError, ConfigError, require_packages
from rayembed.models.versions import VECTORS
from rayembed.pipeline.run.runtime import Runtime, runtime_of
from rayembed_extras.indexing import documents as reading
from rayembed_extras.indexing.checks import (
    CheckedIndex,
    check_deletions,
    check_name,
    check_room,
    check_wanted,
    nothing_left,
    settled_run,
)
from rayembed_extras.indexing.documents import (
    IndexPiece,
    ReadIndexDocuments,
    TokenizerPlace,
    kept_settings,
    recorded_settings,
    stated_types,
)
from rayembed_extras.indexing.embed import AFTER, BEFORE, IndexModelSpec, ModelCheck, load
from rayembed_extras.indexing.growth import divide_grown, grown_parts, parts_for
from rayembed_extras.indexing.layout import layout_of
from rayembed_extras.indexing.lock import locked_index
from rayembed_extras.indexing.manifest import (
    Manifest,
    TableRecord,
    changed_table,
    folder_of,
    last_number,
    read_manifest,
    write_manifest,
)
from rayembed_extras.indexing.outcome import Indexed, counts_of
from rayembed_extras.indexing.parts import (
    ComparePart,
    EmbedIndexPart,
    IndexPart,
    PartFiles,
    check_rows,
    doubt_parts,
    folders_in,
    parts_to_write,
    settle,
)
from rayembed_extras.indexing.places import close_opened
from rayembed_extras.indexing.registration import register_index
from rayembed_extras.indexing.rows import (
    RowsFile,
    SendToParts,
    accept,
    metadata_types,
    warn_of_empty,
)
from rayembed_extras.indexing.settings import IndexRun
from rayembed_extras.indexing.store import Layout

logger = logging.getLogger(__name__)

CHECK, READ, COMPARE, EMBED, FINISH = "checks", "documents", "differences", "vectors", "store"
"""Phases of a job."""


def build_index(run: IndexRun, *, update: bool = False, beside: str | None = None) -> Indexed:
    """Build an index, or bring it up to date; return its record and counts.

    Everything that a user can get wrong is checked before a worker starts.

    Args:
        update: compare with what the index has; without it a complete index is refused.
        beside: fill this table beside the index's current one, to which its name goes on to refer;
            the caller has locked the index, and switches the name. None: the current one.

    Raises:
        RayembedError: what is wrong and what to do.
    """
    began = time.monotonic()
    run = settled_run(run)
    require_packages(f"the store {run.store.kind}", "indexes", *run.store.packages)
    storage = run.placement.storage_path
    otherwise = "" if update else "; or give a new index another --name"
    with locked_index(storage, run.name, otherwise) if beside is None else nullcontext():
        before = read_manifest(storage, run.name)
        if beside is None and before is not None and before.current is not None:
            check_wanted(run, before, update=update)
            before = check_name(run, before)
        with nothing_left(run) if before is None else nullcontext():
            job = _Job.of(run, before, update=update, beside=beside)
            try:
                with overview([CHECK, READ, COMPARE, EMBED, FINISH]):
                    manifest = job.work(began)
            finally:
                load.cache_clear()  # the model that this process has loaded
                job.store.close()
                close_opened()
        register_index(before, manifest, storage, run.tracking_uri)
        return Indexed(run.name, manifest, storage, job.run.store)


@dataclass
class _Job(CheckedIndex):
    """A job on one table of an index."""

    rows: int = 0
    """Rows of the files."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Rejected rows by reason."""
    earlier: list[Result] = field(default_factory=list)
    """Results of parts that earlier tries of this job have finished."""
    text_bytes: int = 0
    """Bytes of all rows without vectors, compressed."""

    def work(self, began: float) -> Manifest:
        """Do the job, and return the record of the index."""
        runtime = runtime_of(self.run.placement)
        runtime.start()
        context = context_of(self.run, runtime)
        model = self._model(context)
        enter(READ)
        working = self._working()
        record, files = self._read(context, model, working)
        enter(COMPARE)
        items = [IndexPart(number) for number in range(files.parts)]
        compared = run_resumable(
            files.differences,
            f"differences {self.run.name}",
            ComparePart(files),
            items,
            context.execute,
        )
        check_deletions(self.run, record, compared)
        enter(EMBED)
        self._check_room(record, files, compared)
        if any(one["embed"] for one in compared):
            self._check_model(context, model)
        record, files = self._begin(context, record, files)
        embedding = time.monotonic()
        results = self._embed(context, model, record, files, compared)
        seconds = time.monotonic() - embedding
        rows = sum(result["rows_in"] for result in compared)
        check_rows(files, self.store, self.table, rows)
        enter(FINISH)
        self.store.finish(self.table, layout_of(record))
        if not self.is_beside:
            self.store.point(self.run.name, self.table)
        counts = counts_of(self.rows, self.rejected, compared, self.earlier, results, seconds)
        counts["seconds_in_all"] = round(time.monotonic() - began, 3)
        self._remember(record, compared, counts)
        remove_folder(join(self._folder, "working"))
        return self.manifest

    @property
    def is_beside(self) -> bool:
        """Whether the index's name refers to another table, and goes on to do so."""
        return self.manifest.current not in (None, self.table)

    @property
    def _folder(self) -> str:
        return join(folder_of(self.run.placement.storage_path, self.run.name), self.table)

    def _model(self, context: PipelineContext) -> IndexModelSpec:
        """Return what all processes load, with the number type of the record if any."""
        settings = self.run.model
        if self.record is not None and settings.dtype == "auto":
            settings = settings.model_copy(update={"dtype": self.record.made_by.dtype})
        if format_of(self.folder) is not None:  # a graph of a CPU runtime, with types of its own
            settings = settings.model_copy(update={"dtype": "float32"})
        dtype = cast(Dtype, context.teacher_loader.settled(settings).dtype)
        if self.record is not None and dtype != self.record.made_by.dtype:
            raise ConfigError(
                f"model.dtype={dtype}, but the index {self.run.name!r} was computed in "
                f"{self.record.made_by.dtype}; leave model.dtype out"
            )
        return IndexModelSpec(
            self.reference,
            self.weights,
            self.tracking_uri,
            settings.instruction,
            self.dimensions,
            dtype,
            settings.tokens_per_batch,
            join(self._folder, "golden"),
        )

    def _check_model(self, context: PipelineContext, model: IndexModelSpec) -> None:
        """Raise unless the model gives the vectors that it must."""
        check = EmbedIndexPart(_NO_FILES, model, self.layout({}), self.table, None)
        items = [ModelCheck(BEFORE)]
        run_tasks("check of the model", check, items, context.execute, "gpu or machine")

    def _working(self) -> str:
        """Return the folder of this job's files, and remove files of jobs on other documents.

        Those would otherwise count parts as done that this job changes.
        """
        record = self.record
        inputs = [
            reading.CODE_VERSION,
            VECTORS,
            [piece.key for piece in self.pieces],
            kept_settings(self.run.documents, self.columns),
            [self.run.documents.delimiter, self.run.documents.encoding],
            self.weights,
            self.dimensions,
            self.run.model.instruction,
            self.run.store.model_dump(mode="json"),
            "" if record is None else record.updated,
        ]
        root = join(self._folder, "working")
        name = fingerprint(inputs)
        for other in folders_in(root):
            if other != name:
                logger.info("files of an unfinished job on other documents are removed: %s", other)
                remove_folder(join(root, other))
        return join(root, name)

    def _read(
        self, context: PipelineContext, model: IndexModelSpec, working: str
    ) -> tuple[TableRecord, PartFiles]:
        """Read all documents and send their rows to parts; return the record, also of a new
        table.
        """
        documents = self.run.documents
        folder = join(working, "documents")
        whole = documents.chunks.by == "document"
        tokenizer = (
            None if whole else TokenizerPlace(self.reference, self.weights, model.tracking_uri)
        )
        results = run_resumable(
            folder,
            f"read {self.run.name}",
            ReadIndexDocuments(
                folder,
                self.columns,
                documents.chunks,
                tokenizer,
                self.run.store.limits,
                documents.store_text,
            ),
            [IndexPiece(piece) for piece in self.pieces],
            context.execute,
        )
        self.rows, self.rejected = accept(documents, results)
        rows, row_bytes, self.text_bytes = (
            sum(result[name] for result in results)
            for name in ("rows_out", "row_bytes", "file_bytes")
        )
        parts = parts_for(rows, row_bytes, self.run.rows_per_part)
        former = self.manifest.tables.get(self.manifest.current or "")
        stated = stated_types(documents, self.columns)
        known = stated if self.record is None else self.record.metadata
        otherwise = {} if former is None else former.metadata
        types = metadata_types(self.columns, results, known, otherwise)
        record = self.record
        if record is None:
            warn_of_empty(self.columns, results, {*stated, *otherwise})
            record = TableRecord(
                table=self.table,
                made_by=self.made_by(model.dtype),
                documents=recorded_settings(documents, self.columns),
                metadata=types,
                parts=parts,
            )
        self.store.check(layout_of(record), self.run.name)
        parts = grown_parts(record, parts, self.store)
        types = record.metadata
        names = [name for result in results for name, _ in result["files"]]
        buckets, _ = exchange(
            join(working, "rows"),
            f"send {self.run.name}",
            SendToParts(folder, parts, types),
            [RowsFile(name) for name in names],
            parts,
            context.execute,
        )
        files = PartFiles(
            buckets,
            join(self._folder, "ledger"),
            join(working, f"{parts:06d}"),
            tuple(types.items()),
            self.columns.id is not None,
            parts,
            record.parts,
        )
        return record, files

    def _check_room(
        self, record: TableRecord, files: PartFiles, compared: Sequence[Result]
    ) -> None:
        """Raise if the store has no room for the rows to write, or to divide a grown table."""
        work, done = parts_to_write(files, compared)
        rows = sum(result["rows_in"] for result in compared)
        written = sum(compared[part.number]["write"] for part in work if part not in done)
        if files.parts > record.parts and hasattr(self.store, "divide_part"):
            written = max(written, record.rows)  # in files beside those of the former parts
        check_room(self.run, layout_of(record), written, self.text_bytes / max(rows, 1))

    def _begin(
        self, context: PipelineContext, record: TableRecord, files: PartFiles
    ) -> tuple[TableRecord, PartFiles]:
        """Write the record of a new table, create it in the store, and divide a grown one."""
        if self.record is None:
            tables = {**self.manifest.tables, self.table: record}
            self.manifest = self.manifest.model_copy(update={"tables": tables})
            write_manifest(self.run.placement.storage_path, self.manifest)
        self.store.create(self.table, layout_of(record))
        self.manifest = divide_grown(
            self.run, self.manifest, self.table, files.parts, self.store, context.execute
        )
        return self.manifest.tables[self.table], replace(files, ledgers=files.parts)

    def _embed(
        self,
        context: PipelineContext,
        model: IndexModelSpec,
        record: TableRecord,
        files: PartFiles,
        compared: Sequence[Result],
    ) -> list[Result]:
        """Embed and write the parts that have new, changed or deleted rows."""
        work, done = parts_to_write(files, compared)
        todo = [part for part in work if part not in done]
        paths = [files.done_path(part.number) for part in done]
        self.earlier = [read_json(path, remedy(path)) for path in paths]
        # Also where an earlier try embedded all of them, and stopped before its last check.
        embeds = any(compared[part.number]["embed"] for part in work)
        items: list[Any] = [*todo, *([ModelCheck(AFTER)] if embeds else [])]
        if not items:
            return []
        here = not self.store.has_parallel_writers
        store = None if here else self.run.store.model_dump_json()
        task = EmbedIndexPart(files, model, layout_of(record), self.table, store)
        execute = context.execute
        if here:
            execute = self._writing(files, layout_of(record), context.execute)
        try:
            return run_tasks(f"embed {self.run.name}", task, items, execute, "gpu or machine")
        except ArtifactError as error:
            if "gives other vectors here" in str(error):
                doubt_parts(files, work)
            raise

    def _writing(self, files: PartFiles, layout: Layout, execute: Execute) -> Execute:
        """Wrap an `Execute` so that this process writes each part to the store as it arrives."""

        def run(task: Task, items: Sequence[Any], needs: Needs = "cpu") -> Iterator[Result]:
            for item, timed in zip(items, execute(task, items, needs), strict=True):
                if isinstance(item, IndexPart):
                    rows, found = files.difference(item.number)
                    result = timed["result"]
                    settle(files, self.store, self.table, item.number, rows, found, result, layout)
                yield timed

        return run

    def _remember(
        self, record: TableRecord, compared: Sequence[Result], counts: Mapping[str, Any]
    ) -> None:
        """Write the record of the finished table, to which the index's name now refers."""
        documents = counts["new"] + counts["changed"] + counts["unchanged"]
        rows = sum(result["rows_in"] for result in compared)
        changed = changed_table(
            self.manifest,
            record.table,
            documents=recorded_settings(self.run.documents, self.columns),
            complete=True,
            rows=rows,
            documents_read=documents,
            counts=dict(counts),
            updated=datetime.now(UTC).isoformat(timespec="microseconds"),  # a key of later work
        )
        current = self.manifest.current if self.is_beside else self.table
        last = last_number(changed)
        self.manifest = changed.model_copy(update={"current": current, "last_number": last})
        write_manifest(self.run.placement.storage_path, self.manifest)


def context_of(run: IndexRun, runtime: Runtime) -> PipelineContext:
    """Return how the runtime executes tasks, and its number type for models."""
    # All that is read of a data job's settings.
    asked: Any = SimpleNamespace(placement=run.placement, seed=0, data=SimpleNamespace(root=""))
    return runtime.data_context(cast(DataRun, asked))


_NO_FILES = cast(PartFiles, None)
"""Files of a task that only checks the model."""
