"""Parse references to files of the Wikipedia sample. `rayembed.recipes.sample` writes them down."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args
from urllib.parse import parse_qsl

from rayembed.config.own_sets import OwnSet, RetrievalSet
from rayembed.config.settings import nearest, parse
from rayembed.errors import AssetError, ConfigError
from rayembed.recipes.sample import (
    PREFIX,
    Language,
    RowFile,
    RowKind,
    SampleFile,
    ScoreSizes,
    TaskFolder,
    TaskName,
    row_reference,
    task_reference,
)

LANGUAGE_FILES: Mapping[str, str] = {"en": "en-us", "fr": "fr-fr", "es": "es-es"}
"""Language → the value of `{language}` in the path of the summaries."""


@dataclass(frozen=True)
class SampleReference:
    """A parsed reference: the part of the sample, and a path inside it."""

    part: RowFile | TaskFolder
    inside: str
    """Path of the file below the folder of its part; empty for the folder."""


def parse_reference(reference: str) -> SampleReference:
    """Parse a reference to a file of the sample; raise if it has unknown or ineffective
    options.

    Raises:
        AssetError: no such file or parameter; the message names the nearest one.
    """
    path, _, query = reference.removeprefix(PREFIX).partition("?")
    name, _, inside = path.partition("/")
    values = dict(parse_qsl(query, keep_blank_values=True))
    kind = name.removesuffix(".jsonl")
    files = (*(f"{known}.jsonl" for known in get_args(RowKind)), *get_args(TaskName))
    if not reference.startswith(PREFIX) or name not in files:
        raise AssetError(
            f"there is no sample {reference!r}; expected {PREFIX}<file>, {nearest(name, files)}"
        )
    try:
        if name.endswith(".jsonl"):
            rows = parse(RowFile, {"kind": kind, **values})
            found, canonical = SampleReference(rows, name), row_reference(rows)
        else:
            # Tables have no corpus, whose size would have to fit the held-out titles.
            least = {} if "Retrieval" in name else {"documents": 1, "queries": 1}
            task = parse(TaskFolder, {"task": name, **least, **values})
            found, canonical = SampleReference(task, inside), task_reference(task, inside)
    except ConfigError as error:
        raise AssetError(f"the sample {reference!r}: {error}") from None
    known = dict(parse_qsl(canonical.partition("?")[2]))
    if extra := sorted(values.keys() - known.keys()):
        raise AssetError(
            f"the sample {reference!r} sets {', '.join(extra)}, which has no effect or is the "
            f"default; write {canonical}"
        )
    return found


def sizes_of(sets: Iterable[OwnSet]) -> ScoreSizes | None:
    """Return the sizes in the reference of the first retrieval set from the sample; None if no set
    is from it.
    """
    for own in sets:
        if own.path.startswith(PREFIX) and isinstance(own, RetrievalSet) and not own.languages:
            part = parse_reference(own.path).part
            return ScoreSizes(**{name: getattr(part, name) for name in ScoreSizes.model_fields})
    return None


def place_of(part: SampleFile, language: Language) -> str:
    """Asset reference of the summaries in a language."""
    return part.source.replace("{language}", LANGUAGE_FILES[language])


def languages_read(part: RowFile | TaskFolder) -> tuple[Language, ...]:
    """Languages whose summaries affect the files; their held-out titles are kept out of all
    rows.
    """
    if isinstance(part, TaskFolder):
        return (part.language or "en", *part.languages)
    return tuple(sorted({part.language, *([part.to] if part.to else []), *part.held_out_of}))
