"""The sources and own sets that recipes take of the Wikipedia sample, and its name as a benchmark.

Nothing here reads the sample: sources and sets name files that are made where they are read.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from rayembed.config.own_sets import (
    ClassificationSet,
    ClusteringSet,
    OwnSet,
    PairClassificationSet,
    RetrievalSet,
    STSSet,
)
from rayembed.config.settings import Settings, changed, parse
from rayembed.config.types import Reference, Seed
from rayembed.data.sources.classes import ClassesSource
from rayembed.data.sources.pairs import PairsSource
from rayembed.samples.assets import (
    CLASSIFICATION_TASK,
    CLUSTERING_TASK,
    CROSS_LINGUAL_TASK,
    DESCRIPTION_TASK,
    SENTENCE_TASK,
    SUMMARIES,
)
from rayembed.samples.references import (
    CROSS_LINGUAL,
    LANGUAGE_CODES,
    PREFIX,
    RETRIEVAL_TASKS,
    TASK_NAMES,
    Language,
    Languages,
    RowFile,
    RowKind,
    ScoreSizes,
    TaskFolder,
    TaskName,
    parse_reference,
    row_reference,
    task_reference,
)

_TABLE_TEXTS = 440
"""Texts of each set that is no retrieval, which are half as long; about."""

_INSTRUCTIONS: Mapping[str, str] = {
    "WikiSentenceRetrieval": SENTENCE_TASK,
    "WikiDescriptionRetrieval": DESCRIPTION_TASK,
    "WikiTopicClassification": CLASSIFICATION_TASK,
    "WikiTopicClustering": CLUSTERING_TASK,
    CROSS_LINGUAL: CROSS_LINGUAL_TASK,
}


class Wikipedia(Settings):
    """The sample, divided into titles for training and held-out ones."""

    held_out: int = 1000
    """Titles of each language that no training row touches."""
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
        """Pairs of the training titles.

        `description`: description → text. `sentence`: one sentence → the rest of its article.
        `translation`: text → text of the article of the same title in the language `to`. Titles
        are masked.
        """
        return PairsSource(path=self._rows(kind, language, to), id="id")

    def topics(self) -> ClassesSource:
        """Title-masked texts of the training titles with their topic."""
        return ClassesSource(path=self._rows("topics"), id="id")

    def texts(self, language: Language) -> str:
        """File of all texts of a language, those of held-out titles too."""
        return row_reference(RowFile(kind="texts", language=language, source=self.source))

    def scores(self, **sizes: Any) -> tuple[OwnSet, ...]:
        """The sets over the held-out titles; sizes are those of `ScoreSizes`."""
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
    """The sample's tasks as own sets, in the order of tables.

    Args:
        names: of some tasks; None: all that the sizes give.
    """
    known = (*TASK_NAMES, *([CROSS_LINGUAL] if sizes.languages else ()))
    wanted = set(known if names is None else names)
    return tuple(_own_set(name, sizes) for name in known if name in wanted)


def sizes_of(sets: Iterable[OwnSet]) -> ScoreSizes | None:
    """The sizes of the first of the sample's sets for retrieval; None: there is none."""
    for own in sets:
        if own.path.startswith(PREFIX) and isinstance(own, RetrievalSet) and not own.languages:
            part = parse_reference(own.path).part
            return ScoreSizes(**{name: getattr(part, name) for name in ScoreSizes.model_fields})
    return None


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


class WikipediaBenchmark:
    """The sample's tasks among benchmarks, `wikipedia?documents=300`."""

    name = "wikipedia"
    tasks: tuple[str, ...] = TASK_NAMES
    prefix = PREFIX
    licence = "cc-by-sa-4.0"

    def own_sets(
        self, sizes: dict[str, str], tasks: Iterable[str] | None = None
    ) -> tuple[OwnSet, ...]:
        """The tasks of these sizes, which are those of `ScoreSizes`.

        Raises:
            ConfigError: an unknown size.
        """
        return own_sets(parse(ScoreSizes, sizes), tasks)

    def in_language(self, own: OwnSet, language: str) -> OwnSet | None:
        """One of the sets in a language, of mteb's codes; itself where it names a language, None
        where the sample has no such texts.
        """
        part = parse_reference(own.path).part
        assert isinstance(part, TaskFolder)
        if part.language or part.task == CROSS_LINGUAL:
            return own
        found = [code for code, name in LANGUAGE_CODES.items() if name == language]
        if not found:
            return None
        sizes = {name: getattr(part, name) for name in ScoreSizes.model_fields}
        other = _own_set(part.task, ScoreSizes(**{**sizes, "language": found[0]}))
        places = {n: getattr(other, n) for n in ("path", "train", "language") if hasattr(other, n)}
        return changed(own, **places)

    def num_tokens(self, own: OwnSet) -> float:
        """About how many tokens the texts of one of the sets have."""
        part = parse_reference(own.path).part
        assert isinstance(part, TaskFolder)
        if isinstance(own, RetrievalSet):
            parts = max(len(part.languages), 1)
            return parts * part.max_length * (part.documents + part.queries)
        return _TABLE_TEXTS * part.max_length / 2


BENCHMARK = WikipediaBenchmark()
