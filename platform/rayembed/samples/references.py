"""References of the sample's files: `sample://wikipedia/<file>?<what decides its content>`.

    sample://wikipedia/sentence.jsonl?held_out=500&seed=1      rows for training
    sample://wikipedia/WikiRelatednessSTS/test.jsonl           a set of the scores
    sample://wikipedia/WikiSentenceRetrieval?max_length=64     one of retrieval: a BEIR folder

Parameters at their defaults are left out, so that equal files have equal references. Nothing is
read or made by writing a reference down; `files` makes what it names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args
from urllib.parse import parse_qsl, quote

from pydantic import AfterValidator, BeforeValidator, NonNegativeInt, PositiveInt, model_validator

from rayembed.config.settings import Settings, nearest, parse
from rayembed.config.types import Reference, Seed
from rayembed.errors import AssetError, ConfigError
from rayembed.samples.assets import SUMMARIES

PREFIX = "sample://wikipedia/"

Language = Literal["en", "fr", "es"]

LANGUAGE_FILES: Mapping[str, str] = {"en": "en-us", "fr": "fr-fr", "es": "es-es"}
"""Language → what stands for `{language}` in the place of the summaries."""

LANGUAGE_CODES: Mapping[str, str] = {"en": "eng-Latn", "fr": "fra-Latn", "es": "spa-Latn"}
"""Language → its code of ISO 639-3 and script of ISO 15924."""

RowKind = Literal["description", "sentence", "translation", "topics", "texts"]

TaskName = Literal[
    "WikiSentenceRetrieval",
    "WikiDescriptionRetrieval",
    "WikiTopicClassification",
    "WikiTopicClustering",
    "WikiTitleDescriptionPairClassification",
    "WikiRelatednessSTS",
    "WikiCrossLingualRetrieval",
]

CROSS_LINGUAL: TaskName = "WikiCrossLingualRetrieval"
TASK_NAMES: tuple[TaskName, ...] = tuple(
    name for name in get_args(TaskName) if name != CROSS_LINGUAL
)
"""Tasks that need no other language, in the order in which tables show them."""

RETRIEVAL_TASKS = TASK_NAMES[:2]
"""Names of the tasks that have documents and queries."""


def _split(value: Any) -> Any:
    return tuple(value.split(",")) if isinstance(value, str) else value


Languages = Annotated[
    tuple[Language, ...], BeforeValidator(_split), AfterValidator(lambda v: tuple(sorted(set(v))))
]


class SampleFile(Settings):
    """Settings that decide the content of any file of the sample."""

    source: Reference = SUMMARIES
    """Asset reference of the JSON file of summaries, with `{language}` in place of the language."""

    def summaries(self, language: Language) -> str:
        """Asset reference of the summaries in a language."""
        return self.source.replace("{language}", LANGUAGE_FILES[language])


class RowFile(SampleFile):
    """A file of rows for training."""

    kind: RowKind
    language: Language = "en"
    """Language of the articles."""
    to: Language | None = None
    """Language of the positives, for translations."""
    held_out: NonNegativeInt = 1000
    """Titles of each language of `held_out_of` that no row touches."""
    held_out_of: Languages = ()
    """Further languages whose held-out titles no row touches; all that a run trains on."""
    seed: Seed = 0
    """Seed of the choice of held-out titles, and of the sentence of an article."""

    @model_validator(mode="after")
    def _another_language_for_translations(self) -> "RowFile":
        if (self.kind == "translation") != (self.to is not None) or self.to == self.language:
            raise ValueError(
                "translation.jsonl, and no other file, needs `to`, the language of the positives, "
                f"another one than that of the queries; kind is {self.kind!r}, to {self.to!r}"
            )
        return self

    @property
    def read(self) -> tuple[Language, ...]:
        """Languages whose summaries decide the file: their held-out titles no row touches."""
        return tuple(sorted({self.language, *([self.to] if self.to else []), *self.held_out_of}))


class ScoreSizes(SampleFile):
    """Settings that decide the sets of the scores; defaults are those of NV-Embed's quickstart."""

    held_out: PositiveInt = 1000
    """Titles that the sets are made of, held out of training."""
    first: NonNegativeInt = 0
    """Place of the first of them among the held-out titles; those before it are left to others."""
    seed: Seed = 0
    """Seed of the choice of held-out titles and samples."""
    documents: PositiveInt = 500
    """Documents of the retrieval corpora."""
    queries: PositiveInt = 200
    """Queries of the retrieval tasks."""
    max_length: PositiveInt = 48
    """Tokens to which the texts of retrieval are cut (by words); of other tasks half of it."""
    languages: Languages = ()
    """Other languages of the sample, whose articles find those of the same title."""
    topic: str = ""
    """Topic of the articles; empty: all topics."""
    language: Language | Literal[""] = ""
    """Language of the articles; empty: English, or in a guarded run that of its own data."""

    @model_validator(mode="after")
    def _there_are_as_many(self) -> "ScoreSizes":
        if self.queries > self.documents:
            raise ValueError(
                f"queries {self.queries} exceeds documents {self.documents}: each query has its "
                "document"
            )
        if self.documents > self.held_out:
            raise ValueError(
                f"documents {self.documents} exceeds held_out {self.held_out}, the titles that no "
                "training row touches; hold out more or ask for fewer"
            )
        return self


class TaskFolder(ScoreSizes):
    """The files of one task."""

    task: TaskName

    @property
    def read(self) -> tuple[Language, ...]:
        """Languages whose summaries decide the files."""
        return (self.language or "en", *self.languages)

    @model_validator(mode="after")
    def _languages_cross(self) -> "TaskFolder":
        if (self.task == CROSS_LINGUAL) != bool(self.languages):
            raise ValueError(
                f"{CROSS_LINGUAL}, and no other task, needs languages such as fr,es; there are "
                f"{self.languages} for {self.task}"
            )
        return self


@dataclass(frozen=True)
class SampleReference:
    """A reference, taken apart."""

    part: RowFile | TaskFolder
    inside: str
    """Path of the file below the folder of its part; empty for the folder."""


def row_reference(part: RowFile) -> str:
    """The reference of a file of rows."""
    names = ("language", "source", "to", "held_out", "held_out_of", "seed")
    return _reference(f"{part.kind}.jsonl", part, names[:2] if part.kind == "texts" else names)


def task_reference(part: TaskFolder, inside: str = "") -> str:
    """The reference of a task's folder, or of a file in it."""
    return _reference(f"{part.task}/{inside}".rstrip("/"), part, _decides_task(part.task))


def parse_reference(reference: str) -> SampleReference:
    """The parts of a reference.

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
            f"the sample {reference!r} names {', '.join(extra)}, which decides nothing of it or is "
            f"the default; write {canonical}"
        )
    return found


def _decides_task(task: TaskName) -> tuple[str, ...]:
    """Parameters that decide the content of a task's files."""
    if task in RETRIEVAL_TASKS:
        return (
            "source",
            "held_out",
            "first",
            "seed",
            "documents",
            "queries",
            "max_length",
            "topic",
            "language",
        )
    if task == CROSS_LINGUAL:
        return (*_decides_task(RETRIEVAL_TASKS[0]), "languages")
    return ("source", "held_out", "first", "seed", "max_length", "topic", "language")


def _reference(path: str, part: SampleFile, names: tuple[str, ...]) -> str:
    values = {name: getattr(part, name) for name in names}
    told = {
        name: ",".join(value) if isinstance(value, tuple) else str(value)
        for name, value in values.items()
        if value != type(part).model_fields[name].default
    }
    query = "&".join(f"{name}={quote(value, safe='/:,{}')}" for name, value in told.items())
    return f"{PREFIX}{path}" + (f"?{query}" if query else "")
