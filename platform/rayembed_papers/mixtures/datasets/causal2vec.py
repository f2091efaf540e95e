"""Public retrieval collection of Causal2Vec: Appendix A.3 and Table 8 of arXiv 2507.23386.

It is the one that Springer et al. curated for echo embeddings, after what E5-Mistral was trained
on. The authors' copy is not on the hub; `cfli/bge-e5data` says of itself that it is E5-Mistral's
public data, with negatives. Its English sets are also in `cfli/bge-full-data`, where the names of
the splits are known.

A data set with two instructions stands here twice, with half of its ratio each. A ratio is one of
the records, before training.
"""

from dataclasses import dataclass

from rayembed.config.data import DatasetConfig
from rayembed.recipes.data_recipes import Entry, Home
from rayembed_papers.mixtures.datasets.bge import bge_e5, bge_full
from rayembed_papers.mixtures.datasets.entry import CAUSAL2VEC


@dataclass(frozen=True)
class Row:
    """A data set with one of its instructions."""

    name: str
    instruction: str
    home: Home
    ratio: float = 1.0


_WIKIPEDIA = "Given a question, retrieve Wikipedia passages that answer the question"
_CHINESE = "Given a Chinese search query, retrieve web passages that answer the question"

ROWS = (
    Row(
        "eli5",
        "Provided a user question, retrieve the highest voted answers on Reddit ELI5 forum",
        bge_e5("eli5"),
        0.1,
    ),
    Row(
        "hotpotqa",
        "Given a multi-hop question, retrieve documents that can help answer the question",
        bge_full("hotpotqa"),
    ),
    Row(
        "fever",
        "Given a claim, retrieve documents that support or refute the claim",
        bge_full("fever"),
    ),
    Row("miracl", _WIKIPEDIA, bge_e5("miracl_*")),
    Row(
        "msmarco-passage",
        "Given a web search query, retrieve relevant passages that answer the query",
        bge_full("msmarco_passage"),
        0.5,
    ),
    Row(
        "msmarco-document",
        "Given a web search query, retrieve relevant documents that answer the query",
        bge_e5("msmarco_document"),
        0.2,
    ),
    Row("nq", _WIKIPEDIA, bge_full("nq")),
    Row(
        "nli-entailed",
        "Given a premise, retrieve a hypothesis that is entailed by the premise",
        bge_full("nli"),
        0.5,
    ),
    Row("nli-similar", "Retrieve semantically similar text", bge_full("nli"), 0.5),
    Row("squad", "Retrieve Wikipedia passages that answer the question", bge_full("squad")),
    Row("triviaqa", "Retrieve Wikipedia passages that answer the question", bge_full("trivial")),
    Row(
        "quora-equivalent",
        "Given a question, retrieve questions that are semantically equivalent to the given "
        "question",
        bge_full("quora"),
        0.05,
    ),
    Row(
        "quora-same-meaning",
        "Find questions that have the same meaning as the input question",
        bge_full("quora"),
        0.05,
    ),
    Row("mr-tydi", _WIKIPEDIA, bge_e5("mr_tydi_*")),
    Row("dureader", _CHINESE, bge_e5("dureader")),
    Row("t2ranking", _CHINESE, bge_e5("t2ranking"), 0.5),
)
"""Rows of Table 8, in its order."""


def entries() -> tuple[Entry, ...]:
    """All data sets of the appendix; instructions are before queries only."""
    return tuple(_entry(row) for row in ROWS)


def _entry(row: Row) -> Entry:
    config = DatasetConfig(
        name=row.name,
        source=row.home.source,
        query_instruction=row.instruction,
        sample_share=None if row.ratio == 1.0 else row.ratio,
    )
    return Entry(config, CAUSAL2VEC, "Appendix A.3, Table 8", row.home)
