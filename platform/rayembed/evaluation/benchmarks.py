"""Make picklable factories of mteb tasks from the names of benchmarks and tasks.

A task holds data and random generators, so it is made anew wherever it is evaluated; what travels
is its name with the subsets and splits that the benchmark evaluates. Every benchmark of mteb over
texts has its own name here; three more are made of its tasks:

    MTEB-MINI               the 30 tasks of Causal2Vec's ablations (Table 9)
    MIRACL                  retrieval in 18 languages over whole Wikipedias (Nomic v2's Table 5)
    MIRACL-HardNegatives    the same queries over the pooled best 250 documents of each
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import mteb
from mteb.abstasks.classification import AbsTaskClassification
from mteb.abstasks.clustering import AbsTaskClustering
from mteb.get_tasks import TASK_LIST

from rayembed.config.settings import nearest
from rayembed.errors import ConfigError
from rayembed.evaluation.mteb_names import no_benchmark, no_task

MTEB_MINI: tuple[str, ...] = (
    *("SciFact", "NFCorpus", "FiQA2018", "SCIDOCS", "TRECCOVID", "Touche2020"),
    *("AskUbuntuDupQuestions", "SciDocsRR", "StackOverflowDupQuestions"),
    *("BiorxivClusteringS2S", "BiorxivClusteringP2P", "MedrxivClusteringS2S"),
    *("MedrxivClusteringP2P", "TwentyNewsgroupsClustering"),
    *("SprintDuplicateQuestions", "TwitterURLCorpus"),
    *("AmazonReviewsClassification", "Banking77Classification", "EmotionClassification"),
    *("MTOPDomainClassification", "TweetSentimentExtractionClassification", "ImdbClassification"),
    *("BIOSSES", "STS12", "STS13", "STS14", "STS15", "STS16", "STSBenchmark"),
    "SummEval",
)
"""Causal2Vec, Table 9, whose `BIOSESSES` is BIOSSES; splits and subsets are MTEB(eng, v1)'s."""

ENGLISH_V1 = "MTEB(eng, v1)"
_MADE_HERE = {
    "MIRACL": "MIRACLRetrieval",
    # Of the two versions this one has MIRACL's own instruction; the data are the same.
    "MIRACL-HardNegatives": "MIRACLRetrievalHardNegatives.v2",
}

_TEXTS_UNKNOWN = 10_000
"""Stands for the size of a task that mteb has no statistics of; most tasks are about as large."""


@dataclass(frozen=True)
class MtebTask:
    """Picklable description of one mteb task, which `load` turns into a fresh task."""

    name: str
    subsets: tuple[str, ...] | None = None
    """Subsets of the data set, mostly languages; None: all subsets of the task."""
    eval_splits: tuple[str, ...] | None = None
    """Splits to score; None: the task's evaluation splits."""

    def load(self) -> Any:
        """Return a fresh task, without its data.

        Raises:
            ConfigError: mteb has no such task, or the task no such subset.
        """
        if self.name not in task_names():
            raise ConfigError(no_task(self.name, task_names()))
        try:
            task = mteb.get_task(self.name, eval_splits=self.eval_splits, hf_subsets=self.subsets)
        except ValueError:
            known = mteb.get_task(self.name).metadata.hf_subsets
            (asked, *_) = [s for s in self.subsets or () if s not in known]
            raise ConfigError(
                f"the task {self.name!r} has no subset {asked!r}; {nearest(asked, known)}"
            ) from None
        if task.is_aggregate:
            return _with_own_members(task)
        if isinstance(task, AbsTaskClassification):
            # mteb's is shared by all tasks of the process; of two at a time one would be wrong.
            task.evaluator_model = copy.deepcopy(task.evaluator_model)
        return task

    @property
    def num_texts(self) -> int:
        """Number of distinct texts to embed, from mteb's statistics, without loading data."""
        return _num_texts(self)


def benchmark_names() -> tuple[str, ...]:
    """Sorted names of all mteb benchmarks over texts."""
    of_mteb = [found.name for found in mteb.get_benchmarks() if not other_inputs(found.tasks)]
    return tuple(sorted([*of_mteb, "MTEB-MINI", *_MADE_HERE]))


def benchmark_tasks(name: str, *, also: Sequence[str] = ()) -> tuple[MtebTask, ...]:
    """List the tasks of a benchmark, in its order.

    MTEB(eng, v1) takes the development split of MSMARCO, and English subsets alone; an aggregate
    such as CQADupstackRetrieval is one task (`pieces` takes it apart).

    Args:
        also: names beside mteb's that an error may propose.

    Raises:
        ConfigError: no such benchmark, or one over images, sound or video.
    """
    if name == "MTEB-MINI":
        by_name = {task.name: task for task in benchmark_tasks(ENGLISH_V1)}
        return tuple(by_name[task] for task in MTEB_MINI)
    if name in _MADE_HERE:
        return (MtebTask(_MADE_HERE[name]),)
    try:
        benchmark = mteb.get_benchmark(name)
    except KeyError:
        raise ConfigError(no_benchmark(name, (*benchmark_names(), *also))) from None
    if others := other_inputs(benchmark.tasks):
        raise ConfigError(
            f"the benchmark {name!r} has tasks with inputs of type {', '.join(others)}, but only "
            "benchmarks over texts are evaluated"
        )
    return tuple(_factory(task) for task in benchmark.tasks)


def named_tasks(names: Iterable[str]) -> tuple[MtebTask, ...]:
    """Look up mteb tasks by name, each once, with all their subsets and splits.

    Raises:
        ConfigError: mteb has no such task, or one over images, sound or video.
    """
    found = tuple(MtebTask(name) for name in dict.fromkeys(names))
    for factory in found:
        if others := other_inputs([factory.load()]):
            raise ConfigError(
                f"the task {factory.name!r} has inputs of type {', '.join(others)}, but only "
                "tasks over texts are evaluated"
            )
    return found


def of_languages(tasks: Sequence[MtebTask], languages: Sequence[str]) -> tuple[MtebTask, ...]:
    """Restrict tasks to subsets in one of the languages; drop tasks without such subsets.

    Args:
        languages: codes of ISO 639-3 (`ara`), with a script (`ara-Arab`), or the data set's own
            name of a subset (`ar`).

    Raises:
        ConfigError: no task has one of the languages.
    """
    kept: list[MtebTask] = []
    seen: set[str] = set()
    known: set[str] = set()
    for factory in tasks:
        task = factory.load()
        names = {s: _names_of(task, s) for s in task.hf_subsets}
        known.update(*names.values())
        subsets = tuple(s for s, told in names.items() if told & set(languages))
        seen.update(*(names[s] for s in subsets))
        if subsets:
            kept.append(replace(factory, subsets=_unless_all(task, subsets)))
    for language in languages:
        if language not in seen:
            raise ConfigError(
                f"none of the named tasks has the language {language!r}; {nearest(language, known)}"
            )
    return tuple(kept)


def _factory(task: Any) -> MtebTask:
    splits = tuple(task.eval_splits)
    return MtebTask(
        task.metadata.name,
        None if task.is_aggregate else _unless_all(task, tuple(task.hf_subsets)),
        None if splits == tuple(task.metadata.eval_splits) else splits,
    )


def _unless_all(task: Any, subsets: tuple[str, ...]) -> tuple[str, ...] | None:
    return None if set(subsets) == set(task.metadata.hf_subsets) else subsets


def _with_own_members(aggregate: Any) -> Any:
    """Give an aggregate task its own copies of its member tasks, which mteb shares within the
    process.
    """
    members = [type(member)() for member in aggregate.metadata.tasks]
    aggregate.metadata = aggregate.metadata.model_copy(update={"tasks": members})
    aggregate.tasks = members
    aggregate.taskname_to_task = {member.metadata.name: member for member in members}
    return aggregate


@lru_cache(maxsize=1)
def task_names() -> frozenset[str]:
    """Names of all mteb tasks."""
    return frozenset(task.metadata.name for task in TASK_LIST)


def other_inputs(tasks: Iterable[Any]) -> list[str]:
    """Sorted input types of the tasks, such as images, apart from text."""
    return sorted({kind for task in tasks for kind in task.metadata.modalities} - {"text"})


def _names_of(task: Any, subset: str) -> set[str]:
    scripts = task.metadata.hf_subsets_to_langscripts.get(subset, [])
    names = {*scripts, *(script.partition("-")[0] for script in scripts)}
    return names if subset == "default" else {*names, subset}


@lru_cache(maxsize=4096)
def _num_texts(factory: MtebTask) -> int:
    task = factory.load()
    if task.is_aggregate:
        return sum(MtebTask(member.metadata.name).num_texts for member in task.metadata.tasks)
    statistics = task.metadata.descriptive_stats or {}
    count = 0
    for split in task.eval_splits:
        for subset in task.hf_subsets:
            table = _table(statistics, split, subset)
            count += _encoded(task, table)
            if isinstance(task, AbsTaskClassification):
                train = _table(statistics, task.train_split, subset)
                count += min(_different(train), _training_examples(task, table))
    return count or _TEXTS_UNKNOWN


def _table(statistics: Mapping[str, Any], split: str, subset: str) -> Mapping[str, Any]:
    """Look up mteb's descriptive statistics of a subset; empty if mteb has none."""
    whole = statistics.get(split, {})
    by_subset = whole.get("hf_subset_descriptive_stats")
    return dict(whole if by_subset is None else by_subset.get(subset, {}))


def _different(table: Mapping[str, Any]) -> int:
    """Count the distinct texts of a subset: documents and queries, or both sides of pairs."""
    parts = [part for part in table.values() if isinstance(part, dict)]
    return sum(int(part.get("unique_texts", 0)) for part in parts)


def _encoded(task: Any, table: Mapping[str, Any]) -> int:
    """Count the texts of the evaluated split that are embedded; clustering embeds only a sample."""
    count = _different(table)
    if not isinstance(task, AbsTaskClustering):
        return count
    if task.max_fraction_of_documents_to_embed is not None:
        return int(task.max_fraction_of_documents_to_embed * count)
    return min(count, task.max_document_to_embed or count)


def _training_examples(task: AbsTaskClassification, table: Mapping[str, Any]) -> int:
    """Maximum number of texts of the training split that a classification task embeds."""
    labels = int((table.get("label_statistics") or {}).get("unique_labels", 0))
    return int(task.samples_per_label * task.n_experiments * labels)
