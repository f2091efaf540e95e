"""Check the settings of an index job against its files, model, store and record, before work."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from rayembed.assets.storage import is_remote, join, list_files, remove_folder
from rayembed.data.engine.work_items import Result
from rayembed.data.sources.files import FilePiece
from rayembed.errors import ArtifactError, ConfigError, DataError, StorageError, StorageFullError
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import check_loadable, saved_widths, tokenizer_of
from rayembed.pipeline.storage import placed
from rayembed.registry.registered_model import SCHEME, find_folder, pinned_reference
from rayembed.registry.tracking_uri import resolve_tracking_uri
from rayembed_extras.indexing.chunks import check_size
from rayembed_extras.indexing.documents import (
    document_pieces,
    kept_settings,
    replace_id,
    settled_columns,
    stated_types,
)
from rayembed_extras.indexing.layout import arrow_types, scale_of
from rayembed_extras.indexing.manifest import (
    MadeBy,
    Manifest,
    TableRecord,
    folder_of,
    followed,
    read_manifest,
)
from rayembed_extras.indexing.places import address_setting
from rayembed_extras.indexing.rows import DocumentColumns
from rayembed_extras.indexing.settings import IndexRun
from rayembed_extras.indexing.store import VECTOR, Layout, VectorStore

FOLDER_KINDS = ("parquet", "lance", "faiss")
"""Kinds of stores whose place is a folder, by default the index's own."""


def settled_run(run: IndexRun) -> IndexRun:
    """Return the settings with an absolute storage path and the store's default folder."""
    run = placed(run)
    if "://" not in run.documents.path:
        path = str(Path(run.documents.path).expanduser().absolute())
        documents = run.documents.model_copy(update={"path": path})
        run = run.model_copy(update={"documents": documents})
    store = run.store
    setting = address_setting(type(store))
    if setting is None or store.kind not in FOLDER_KINDS:
        return run
    place = getattr(store, setting)
    if place is None:
        place = join(folder_of(run.placement.storage_path, run.name), "store")
    elif "://" not in place:
        place = str(Path(place).expanduser().absolute())
    return run.model_copy(update={"store": store.model_copy(update={setting: place})})


def tracking_uri_of(run: IndexRun) -> str | None:
    """MLflow's address, where the model is a registered one; None: it is not."""
    if not run.model.reference.startswith(SCHEME):
        return run.tracking_uri
    return resolve_tracking_uri(run.tracking_uri, run.placement.storage_path, make_folder=False)


@dataclass
class CheckedIndex:
    """A job on one table of an index, whose settings have been checked."""

    run: IndexRun
    manifest: Manifest
    table: str
    record: TableRecord | None
    """Record of the table; None: no job has begun to write it."""
    pieces: Sequence[FilePiece]
    columns: DocumentColumns
    reference: str
    folder: Path
    tracking_uri: str | None
    weights: str
    dimensions: int
    store: VectorStore

    @classmethod
    def of(
        cls, run: IndexRun, manifest: Manifest | None, *, update: bool, beside: str | None = None
    ) -> Self:
        """Check the settings against files, model, store and record.

        Raises:
            RayembedError: what is wrong and what to do.
        """
        check_wanted(run, manifest, update=update or beside is not None)
        if manifest is not None and not run.store.index:  # as the index has it
            index = manifest.store.get("index", {})
            kept = run.store.model_copy(update={"index": index})
            run = run.model_copy(update={"store": kept})
        store = run.store.model_dump(mode="json")
        known = manifest or Manifest(name=run.name, store=store)
        if manifest is not None and beside is None:
            known = manifest.model_copy(update={"store": store})
        table = beside or known.current or f"{run.name}_1"
        record = known.tables.get(table)
        uri = tracking_uri_of(run)
        reference = pinned_reference(run.model.reference, uri)
        folder = find_folder(reference, uri)
        check_loadable(folder)
        widths = saved_widths(folder)
        if run.model.dimensions not in (None, *widths):
            raise ConfigError(
                f"model.dimensions={run.model.dimensions}: the vectors of "
                f"{run.model.reference!r} may be cut to {', '.join(map(str, widths))}"
            )
        documents = run.documents
        if record is not None and documents.id is None:
            documents = replace_id(documents, record.documents.get("id"))
        pieces = document_pieces(documents)
        columns = settled_columns(documents, pieces)
        job = cls(
            run,
            known,
            table,
            record,
            pieces,
            columns,
            reference,
            folder,
            uri,
            weights_fingerprint(folder),
            run.model.dimensions or widths[0],
            cast(VectorStore, run.store.open()),
        )
        try:
            job.check()
        except BaseException:
            job.store.close()
            raise
        return job

    def check(self) -> None:
        """Raise if the record, the model or the store does not allow the job."""
        if self.record is not None:
            check_same(self, self.record)
        documents = self.run.documents
        if documents.chunks.by != "document":
            tokenizer = tokenizer_of(self.folder)
            prompt = tokenizer.prompt(self.run.model.instruction or "", "document")
            check_size(documents.chunks, tokenizer, prompt)
        types: Mapping[str, str] = {} if self.record is None else self.record.metadata
        self.store.check(self.layout(types), self.run.name)
        folder = folder_of(self.run.placement.storage_path, self.run.name)
        is_there = self.table in self.store.tables(self.run.name)
        if self.record is None and is_there:
            raise ConfigError(
                f"the store has a table {self.table!r} that no record in {folder!r} names: another "
                "index uses it. Give this one another --name, or another place (--to)"
            )
        own = join(folder, self.table)
        if not is_there and list_files(join(own, "ledger"), recursive=False):
            raise ArtifactError(
                f"the store has lost the table {self.table!r} of the index {self.run.name!r}; "
                f"restore the table, or remove the folder {own!r} and start the same command "
                "again: it embeds all documents again"
            )

    def made_by(self, dtype: str) -> MadeBy:
        """Return the model and settings for the record of a new table.

        Args:
            dtype: number type of the model's computation.
        """
        number_type = self.run.store.number_type
        return MadeBy(
            reference=self.reference,
            weights=self.weights,
            instruction=self.run.model.instruction,
            dimensions=self.dimensions,
            dtype=dtype,
            number_type=number_type,
            scale=scale_of(self.dimensions, number_type),
        )

    def layout(self, types: Mapping[str, str]) -> Layout:
        """Return the table's columns and vectors with metadata of these types."""
        number_type = self.run.store.number_type
        return Layout(
            self.dimensions,
            number_type,
            arrow_types(types),
            self.run.documents.store_text,
            scale_of(self.dimensions, number_type),
        )


@contextmanager
def nothing_left(run: IndexRun) -> Iterator[None]:
    """Remove what a job has written of an index that it does not begin, as a check refuses it; what
    an earlier job has read stays, and so does this one's where the storage did not answer.
    """
    storage = run.placement.storage_path
    folder = folder_of(storage, run.name)
    table = join(folder, f"{run.name}_1")
    # What a job that was killed has read, or a record that is lost has written.
    had_begun = bool(list_files(table, recursive=True))
    try:
        yield
    except (ConfigError, DataError, ArtifactError) as error:
        may_pass = isinstance(error, StorageError) and not isinstance(error, StorageFullError)
        if not had_begun and not may_pass and read_manifest(storage, run.name) is None:
            remove_folder(table)
            if not is_remote(folder):  # elsewhere there are no empty folders
                for path in (Path(folder, "store"), Path(folder)):
                    with suppress(OSError):
                        path.rmdir()
        raise


def check_wanted(run: IndexRun, manifest: Manifest | None, *, update: bool) -> None:
    """Raise if an index is to be built that is there, or updated that is not, or kept elsewhere."""
    folder = folder_of(run.placement.storage_path, run.name)
    if manifest is None:
        if update:
            raise ConfigError(
                f"there is no index {run.name!r} in {folder!r} to update; leave --update out to "
                "build it, or correct --name or placement.storage_path"
            )
        return
    current = manifest.tables.get(manifest.current or "")
    if current is not None and current.complete and not update:
        raise ConfigError(
            f"the index {run.name!r} is complete ({current.rows:,} rows, {current.updated}); add "
            "--update to bring it up to date, or give the new one another --name"
        )
    store = run.store
    changed = {
        name: value
        for name, value in store.model_dump(mode="json", exclude={*store.changeable}).items()
        if value != manifest.store.get(name, value)
    }
    if changed:
        told = ", ".join(
            f"store.{name}={value!r} (the index has {manifest.store.get(name)!r})"
            for name, value in changed.items()
        )
        raise ConfigError(
            f"the index {run.name!r} is in another store than this job names: {told}; give the "
            "same settings of the store, or give a new index another --name"
        )


def check_name(run: IndexRun, manifest: Manifest) -> Manifest:
    """Return the record after a killed switch of the index's name is finished.

    Raises:
        ArtifactError: another program has let the name refer to another table.
    """
    with closing(cast(VectorStore, run.store.open())) as store:
        manifest = followed(run.placement.storage_path, manifest, store)
        pointed = store.pointed(run.name)
    if pointed not in (None, manifest.current):
        raise ArtifactError(
            f"in the store {run.name!r} refers to {pointed!r}, but the record says "
            f"{manifest.current!r}; another program has moved it. Point it back, or build the "
            "index under another name"
        )
    return manifest


def check_same(job: CheckedIndex, record: TableRecord) -> None:
    """Raise if another model or other document settings made the index's table than the job has.

    Raises:
        ConfigError: it was; the message says what to do.
    """
    name, made, asked = job.run.name, record.made_by, job.run.model
    wanted = {
        "weights": job.weights,
        "instruction": asked.instruction,
        "dimensions": job.dimensions,
        "number_type": job.run.store.number_type,
    }
    other = "give a new index another --name"
    if job.manifest.current is None:
        other = f"remove what an unfinished job has made by: rayembed upgrade --name {name} --drop"
    if made.weights != job.weights:
        if job.manifest.current is None:
            raise ConfigError(
                f"the index {name!r} was begun by {made.reference!r} (weights {made.weights}), but "
                f"model.reference={asked.reference!r} has weights {job.weights}; give --model "
                f"{made.reference} to finish it, or {other}"
            )
        if job.weights in (record.adapter or {}):
            raise ConfigError(
                f"{asked.reference!r} embeds the queries of the index {name!r} alone; its "
                f"documents need --model {made.reference} until a backfill: rayembed upgrade "
                f"--name {name} --model {asked.reference} --road backfill"
            )
        raise ConfigError(
            f"the index {name!r} was made by {made.reference!r} (weights {made.weights}), but "
            f"model.reference={asked.reference!r} has weights {job.weights}; vectors of two models "
            f"cannot be compared. To change the model of the index: rayembed upgrade --name {name} "
            f"--model {asked.reference}; to keep both, give the new index another --name"
        )
    paths = {"instruction": "model.instruction", "dimensions": "model.dimensions"}
    for key, value in wanted.items():
        if (before := getattr(made, key)) != value:
            path = paths.get(key, f"store.{key}")
            raise ConfigError(
                f"{path}={value!r}, but the index {name!r} was made with {before!r}; give "
                f"{path}={'null' if before is None else before}, or {other}"
            )
    kept = kept_settings(job.run.documents, job.columns)
    for key, value in kept.items():
        if (before := record.documents.get(key)) != value:
            raise ConfigError(
                f"documents.{key}={value!r}, but the index {name!r} was made with {before!r}; "
                f"give the same setting, or {other}"
            )
    for column, kind in stated_types(job.run.documents, job.columns).items():
        if (before := record.metadata.get(column)) != kind:
            raise ConfigError(
                f"documents.metadata_types: {column!r} is {kind}, but the index {name!r} was made "
                f"with {before}; leave it out, or {other}"
            )


def check_deletions(run: IndexRun, record: TableRecord, compared: Sequence[Result]) -> None:
    """Raise if an update would delete more documents than allowed.

    Args:
        compared: counts of documents of each part.
    """
    deleted, kept = (
        sum(result[name] for result in compared for name in names)
        for names in (("deleted",), ("changed", "unchanged"))
    )
    most = run.documents.max_deleted_share
    if record.complete and deleted > most * (deleted + kept):
        raise DataError(
            f"{run.documents.path!r} has {kept:,} of the {deleted + kept:,} documents of "
            f"the index {run.name!r}, so that {deleted:,} would be deleted, more than the "
            f"share documents.max_deleted_share={most}. An update takes all documents, not "
            "the new ones alone: name all files, or raise the share (1 allows everything)"
        )


def check_room(run: IndexRun, layout: Layout, rows: int, text_bytes: float) -> None:
    """Raise if a store on a local disk has less room than the rows to write take.

    Args:
        text_bytes: bytes of a row without its vector.

    Raises:
        StorageFullError: it has.
    """
    setting = address_setting(type(run.store))
    place = "" if setting is None else getattr(run.store, setting) or ""
    if not place or "://" in place:
        return
    kind = layout.schema.field(VECTOR).type
    row_bytes = kind.list_size * kind.value_type.bit_width // 8
    # LanceDB joins small files at the end, FAISS writes the index beside the rows.
    copies = (
        2 if run.store.kind == "lance" or (run.store.kind == "faiss" and not run.store.index) else 1
    )
    needed = int(copies * rows * (row_bytes + (text_bytes if layout.has_text else 0)))
    there = next(one for one in (Path(place), *Path(place).absolute().parents) if one.exists())
    if (free := shutil.disk_usage(there).free) < needed:
        raise StorageFullError(
            f"there is no room for the index {run.name!r}: its {rows:,} rows to write take about "
            f"{needed:,} bytes, but {free:,} are free at {place!r}. Make room, or give a new index "
            "another place (--to), then start the same command again"
        )
