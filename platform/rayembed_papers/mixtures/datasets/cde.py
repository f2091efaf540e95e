"""Data sets of CDE (arXiv 2410.02525): Table 5, and BGE's training data.

Both are cut into batches of similar pairs (section 4.1), the texts seen through GTR. Batch and
cluster hold 512 pairs, as in the released model (its card; the paper sweeps both). Three things are
read into it: the paper takes another model, nomic-embed-v1, to tell false negatives, here GTR does
both; it tries two packings, here it is the travelling salesman; it gives no ε, here it is 0 as in
the public code.

The paper names the supervised set without a table: its splits and prefixes are those of the
configuration in its public code, whose loader takes the first positive of a row.
"""

from rayembed.config.data import DatasetConfig, TaskKind
from rayembed.config.mining import ClusterConfig
from rayembed_papers.mixtures.datasets.entries import DatasetEntry
from rayembed_papers.mixtures.datasets.homes import CDE, home_named
from rayembed_papers.mixtures.datasets.nomic_pairs import PAIRS, Use, config_of, home_of, prefixes

SUPERVISED: dict[str, Use] = {
    "amazon_counterfactual_classification": "classification",
    "amazon_reviews_classification": "classification",
    "arguana": "search",
    "arxiv_title": "clustering",
    "arXiv_abstract": "clustering",
    "banking_classification": "classification",
    "biorxiv_abstract": "clustering",
    "biorxiv_title": "clustering",
    "eli5": "search",
    "emotion_classification": "classification",
    "fever": "search",
    "fiqa": "search",
    "hotpotqa": "search",
    "imdb_classification": "classification",
    "medrxiv_abstract": "clustering",
    "medrxiv_title": "clustering",
    "mtop_intent_classification": "classification",
    "msmarco_document": "search",
    "msmarco_passage": "search",
    "nli": "classification",
    "nq": "search",
    "quora": "search",
    "reddit_clustering": "clustering",
    "reddit_clusteringP2P": "clustering",
    "scidocsrr": "search",
    "squad": "search",
    "stack_exchange_clustering": "clustering",
    "stack_exchange_clusteringP2P": "clustering",
    "stack_overflow_dup_questions": "classification",
    "toxic_conversations_classification": "classification",
    "trivial": "search",
    "tweet_sentiment_extraction_classification": "classification",
    "twenty_news_groups": "clustering",
}
"""Split of the repository → prefixes of its texts."""


def unsupervised_entries() -> tuple[DatasetEntry, ...]:
    """Data sets of all rows of Table 5."""
    return tuple(
        DatasetEntry(
            config_of(pairs, clusters()),
            CDE,
            "Table 5",
            home_of(pairs),
            pairs.num_pairs,
        )
        for pairs in PAIRS
    )


def supervised_entries() -> tuple[DatasetEntry, ...]:
    """Data sets of BGE's training data, with its negatives."""
    return tuple(_supervised(split, use) for split, use in SUPERVISED.items())


def clusters() -> ClusterConfig:
    """Cluster settings of the paper (section 4.1; section 5, "Implementation")."""
    return ClusterConfig(
        teacher="hf://sentence-transformers/gtr-t5-base@main",
        max_length=512,
        batch_pairs=512,
        pairs_per_cluster=512,
        iterations=100,
        restarts=3,
        packing="tsp",
        false_negative_margin=0.0,
    )


def _supervised(split: str, use: Use) -> DatasetEntry:
    home = home_named(f"full/{split}")
    query, document = prefixes(use)
    config = DatasetConfig(
        name=f"bge-{split.replace('_', '-')}",
        source=home.source,
        task=_task(split, use),
        query_instruction=query,
        # Both sides of a duplicate are questions.
        document_instruction=query if split == "quora" else document,
        clusters=clusters(),
    )
    return DatasetEntry(config, CDE, "section 5, training data of BGE", home)


def _task(split: str, use: Use) -> TaskKind:
    """Decide the kind of task by the rows' content, because the prefixes would count duplicates and
    NLI as classification.
    """
    if split.endswith("_classification"):
        return "classification"
    return "clustering" if use == "clustering" else "retrieval"
