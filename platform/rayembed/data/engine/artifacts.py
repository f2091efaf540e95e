"""Finished folders of records, each named by the fingerprint of its inputs.

    storage/data/<kind>/<data set>-<fingerprint>/parts/     parts and their indexes
                                                 units/     results of tasks, kept from try to try
                                                 working/   scratch of tasks for later ones, and
                                                            results that stand for it: `units/`
                                                 manifest.json, audit.html

`assets.store` has when a folder counts as finished, and what several jobs do that make one.
"""

import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayembed.assets.clients import split_options
from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.names import check_inside
from rayembed.assets.storage import exists, file_name, join
from rayembed.assets.store import MANIFEST, Entry
from rayembed.config.document import fingerprint
from rayembed.data.engine.parts import Part, remedy
from rayembed.data.engine.work_items import EXAMPLES_KEPT, Execute, Result, add_up, in_process
from rayembed.errors import ArtifactError
from rayembed.models.versions import versions, warn_of_other_versions

if TYPE_CHECKING:
    from rayembed.data.vectors.teacher import TeacherLoader, TeacherSettings

_NEEDED = {"fingerprint", "kind", "parts"}
_TEACHER_DTYPE = "teacher_dtype"


@dataclass(frozen=True)
class DatasetArtifact:
    """A finished folder of records, with its manifest."""

    folder: str
    manifest: Mapping[str, Any]
    reused: bool = field(default=False, compare=False)
    """Whether an earlier run made the folder."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the inputs from which the folder was made."""
        return str(self.manifest["fingerprint"])

    @property
    def relative_path(self) -> str:
        """Path `<kind>/<name>` of the folder below the storage's `data`."""
        return f"{self.manifest['kind']}/{file_name(self.folder)}"

    @property
    def held_out_folder(self) -> str | None:
        """Folder of the held-out part whose rows these records leave out; None if nothing was held
        out.

        It lies beside the folder in the same storage, also where both were moved together.
        """
        told = self.manifest.get("held_out")
        if told is None:
            return None
        place = str(told["folder"])
        if _is_absolute(place):
            return place
        return join(root_of(self.folder), check_inside(place, self._manifest_file))

    @property
    def parts(self) -> list[Part]:
        """Parquet files of the folder, in order."""
        return [
            Part(join(self.folder, "parts", check_inside(name, self._manifest_file)), rows)
            for name, rows in self.manifest["parts"]
        ]

    @property
    def _manifest_file(self) -> str:
        return repr(join(self.folder, MANIFEST))


def _teacher_loader() -> "TeacherLoader":
    from rayembed.data.vectors.teacher import TeacherLoader  # torch, which most readers do not need

    return TeacherLoader()


@dataclass(frozen=True)
class PipelineContext:
    """Settings and functions that all preparation steps share: storage, seed, executor, teacher
    loader.
    """

    storage: str
    """Folder or prefix for results, readable and writable on all machines."""
    seed: int
    execute: Execute = in_process
    teacher_loader: "TeacherLoader" = field(default_factory=_teacher_loader)
    root: str = ""
    """Folder that relative paths in the settings start from."""


@dataclass
class ArtifactWriter:
    """Writer of a folder of records that is not finished yet."""

    storage: str
    kind: str
    """Folder below the storage's `data`."""
    dataset: str
    inputs: Mapping[str, Any]
    """Everything that decides the content, as plain values; their fingerprint names the folder."""
    parent: DatasetArtifact | None = None
    """Folder that this one is derived from; recorded in the manifest."""
    began: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> str:
        """Folder that gets the manifest, and the tasks' results in `units`."""
        named = f"{self.dataset}-{fingerprint(dict(self.inputs))}"
        return join(self.storage, "data", self.kind, named)

    @property
    def parts_folder(self) -> str:
        """Folder of the Parquet parts."""
        return join(self.folder, "parts")

    @property
    def working_folder(self) -> str:
        """Scratch folder for files between tasks; deleted when the folder is finished.

        The results of such tasks (`run_resumable`) are kept here too, to come and go with their
        files.
        """
        return self._entry.working

    def settled(self, context: PipelineContext, teacher: "TeacherSettings") -> "TeacherSettings":
        """Copy the teacher's settings with the number type that this folder was started
        with.

        A job that goes on on machines of another kind would otherwise mix vectors of two types.
        """
        if teacher.dtype != "auto":
            return context.teacher_loader.settled(teacher)
        path = join(self.working_folder, _TEACHER_DTYPE)
        if not exists(path):
            write_json(path, {"dtype": context.teacher_loader.settled(teacher).dtype})
        return teacher.model_copy(update=read_json(path, remedy(path)))

    @property
    def _entry(self) -> Entry:
        return Entry(self.folder)

    def existing(self) -> DatasetArtifact | None:
        """Return the finished folder if an earlier run made it, else None; removes leftover scratch
        files.
        """
        found = self._entry.existing()
        return None if found is None else self._reused(found)

    def get_or_make(self, make: Callable[[], DatasetArtifact]) -> DatasetArtifact:
        """Return the finished folder: the existing one, or else the result of `make`; see
        `Entry`.
        """
        manifest, reused = self._entry.get_or_make(lambda: make().manifest)
        return self._reused(manifest) if reused else DatasetArtifact(self.folder, manifest)

    def _reused(self, manifest: Mapping[str, Any]) -> DatasetArtifact:
        warn_of_other_versions(f"results in {self.folder!r}", manifest.get("versions", {}))
        return DatasetArtifact(self.folder, manifest, reused=True)

    def finish(
        self,
        results: Sequence[Result],
        parts: Sequence[Sequence[Any]],
        dropped: Mapping[str, int] | None = None,
        **more: Any,
    ) -> DatasetArtifact:
        """Write the manifest and check that no row is lost: in = out + rejected + dropped.

        If another job has written the manifest meanwhile, that one is kept.

        Args:
            results: of the tasks that read the rows: `rows_in`, `rows_out`, `rejected`, `examples`.
            parts: name and rows of each part that is the outcome, in order.
            dropped: reason → records made by the tasks that did not come into `parts`.
            more: further entries of the manifest.

        Raises:
            ArtifactError: files of parts are gone, which results of an earlier try tell of.
        """
        rows_in, made, rejected = add_up(results)
        rows_out = sum(int(rows) for _, rows in parts)
        lost = {reason: int(count) for reason, count in (dropped or {}).items() if count}
        if self.parent is not None and "held_out" in self.parent.manifest:
            more = {"held_out": self.parent.manifest["held_out"], **more}
        assert made == rows_out + sum(lost.values()), (made, rows_out, lost)
        self._entry.sizes([str(name) for name, _ in parts], "parts")
        counts = {
            "made_of": self.parent.relative_path if self.parent else None,
            "rows_in": rows_in,
            "rejected": rejected,
            "records_made": made,
            "dropped": lost,
            "rows_out": rows_out,
            "examples": [e for r in results for e in r.get("examples", [])][:EXAMPLES_KEPT],
            "parts": [list(part) for part in parts],
        }
        return self.finish_with({**counts, **more})

    def finish_with(self, entries: Mapping[str, Any]) -> DatasetArtifact:
        """Write the manifest of a folder whose rows are not counted; see `finish`.

        What models decided has the versions of their libraries in it.
        """
        manifest = {
            "fingerprint": fingerprint(dict(self.inputs)),
            "kind": self.kind,
            "dataset": self.dataset,
            "inputs": dict(self.inputs),
            **entries,
            "seconds": round(time.monotonic() - self.began, 3),
        }
        if "vectors" in self.inputs:
            manifest = {**manifest, "versions": versions()}
        return DatasetArtifact(self.folder, self._entry.finish(manifest))


def held_out_entry(storage: str, part: DatasetArtifact) -> dict[str, Any]:
    """Return the manifest entry that names the held-out part whose rows the records leave out."""
    beside = part.folder == join(storage, "data", part.relative_path)
    names = ("queries", "documents", "judgements", "pairs")
    counts = {name: part.manifest[name] for name in names if name in part.manifest}
    folder = part.relative_path if beside else part.folder
    return {"folder": folder, "rows": part.manifest["rows_out"], **counts}


def _is_absolute(place: str) -> bool:
    return "://" in place or place.startswith("/")


def root_of(folder: str) -> str:
    """Return the folder two levels above `folder`."""
    base, options = split_options(folder) if "://" in folder else (folder, "")
    return posixpath.dirname(posixpath.dirname(base.rstrip("/"))) + options


def open_artifact(folder: str, advice: str | None = None) -> DatasetArtifact:
    """Open a finished folder of records.

    Args:
        advice: what to do where it is none, a whole sentence; None: remove it, for one that a
            job's own storage names.

    Raises:
        ArtifactError: it has no manifest, so it is not finished, or is none; or a broken one.
    """
    path = join(folder, MANIFEST)
    if advice is None:
        advice = f"Remove the folder {folder!r}; the job that wrote it writes it again"
    manifest = read_json(path, advice)
    if not manifest.keys() >= _NEEDED:
        raise ArtifactError(
            f"the file {path!r} is not the manifest of a folder of records: a manifest must have "
            f"the entries {', '.join(sorted(_NEEDED))}. {advice}"
        )
    return DatasetArtifact(folder, manifest)
