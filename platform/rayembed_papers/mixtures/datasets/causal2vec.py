"""Public retrieval collection of Causal2Vec: Appendix A.3 and Table 8 of arXiv 2507.23386.

It is the one that Springer et al. curated for echo embeddings, after what E5-Mistral was trained
on. The authors' copy is not on the hub; `cfli/bge-e5data` says of itself that it is E5-Mistral's
public data, with negatives. Its English sets are also in `cfli/bge-full-data`, where the names of
the splits are known.

A data set with two instructions stands here twice, with half of its ratio each. A ratio is one of
the records, before training.
"""

from rayembed.config.data import DatasetConfig
from rayembed_papers.mixtures.datasets.entries import DatasetEntry
from rayembed_papers.mixtures.datasets.homes import CAUSAL2VEC, home_named
from rayembed_papers.printed import rows_of


def entries() -> tuple[DatasetEntry, ...]:
    """Read all data sets of `causal2vec.csv`, whose instructions are for queries only."""
    return tuple(_entry(row) for row in rows_of(__package__, "causal2vec"))


def _entry(row: dict[str, str]) -> DatasetEntry:
    home, ratio = home_named(row["home"]), float(row["ratio"])
    config = DatasetConfig(
        name=row["name"],
        source=home.source,
        query_instruction=row["instruction"],
        sample_share=None if ratio == 1.0 else ratio,
    )
    return DatasetEntry(config, CAUSAL2VEC, "Appendix A.3, Table 8", home)
