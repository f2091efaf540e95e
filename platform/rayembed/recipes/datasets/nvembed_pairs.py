"""Rows of NV-Embed's Table 12 whose documents are texts: retrieval and STS."""

from dataclasses import dataclass

from rayembed.recipes.datasets import nvembed_homes as homes
from rayembed.recipes.datasets.bge import bge_e5, bge_full
from rayembed.recipes.datasets.entry import Home, own_folder


@dataclass(frozen=True)
class Row:
    """A row of Table 12 whose documents are texts."""

    name: str
    instruction: str
    num_samples: int
    home: Home
    given: Home | None = None
    """Public copy that has negatives; None without one."""


_CLAIM = "Given a claim, retrieve documents that support or refute the claim"
_WEB = "Given a web search query, retrieve relevant passages that answer the query"
_PASSAGES = "Given a question, retrieve passages that answer the question"
_HELPFUL = "Given a question, retrieve documents that can help answer the question"
_SIMILAR = "Retrieve semantically similar text."
_BY_SA, _BY_SA_NC, _BY_NC = "CC BY-SA 4.0", "CC BY-NC-SA 3.0", "CC BY-NC 4.0"

RETRIEVAL = (
    Row("arguana", _CLAIM, 16_000, homes.ARGUANA, bge_full("arguana")),
    Row("nli-similar", "Retrieve semantically similar text", 135_000, homes.ALL_NLI, homes.ALL_NLI),
    Row(
        "nli-entailed",
        "Given a premise, retrieve a hypothesis that is entailed by the premise",
        135_000,
        homes.ALL_NLI,
        homes.ALL_NLI,
    ),
    Row("paq-passages", _PASSAGES, 250_000, homes.PAQ),
    Row("paq-documents", _HELPFUL, 250_000, homes.PAQ),
    Row(
        "msmarco",
        _WEB,
        500_000,
        homes.beir(
            "mteb/msmarco", "c5a29a104738b98a9e76336939199e264163d4a0", "alike", "MS MARCO terms"
        ),
        bge_full("msmarco_passage"),
    ),
    Row("squad", _PASSAGES, 87_000, bge_full("squad", negatives=False), bge_full("squad")),
    Row("stackexchange", _WEB, 80_000, homes.STACKEXCHANGE),
    Row("natural-question", _PASSAGES, 100_000, homes.NATURAL_QUESTIONS, bge_full("nq")),
    Row(
        "hotpotqa",
        "Given a multi-hop question, retrieve documents that can help answer the question",
        170_000,
        homes.beir("mteb/hotpotqa", "ab518f4d6fcca38d87c25209f94beba119d02014", "seen", _BY_SA),
        bge_full("hotpotqa"),
    ),
    Row(
        "fever",
        _CLAIM,
        140_000,
        homes.beir("mteb/fever", "bea83ef9e8fb933d90a2f1d5515737465d613e12", "alike", _BY_SA_NC),
        bge_full("fever"),
    ),
    Row(
        "fiqa2018",
        "Given a financial question, retrieve relevant passages that answer the query",
        5_000,
        homes.beir("mteb/fiqa", "27a168819829fe9bcd655c2df245fb19452e8e06", "alike", ""),
        bge_full("fiqa"),
    ),
    Row(
        "bioasq",
        "Given a query, retrieve documents that can help answer the question",
        2_400,
        own_folder(
            "bioasq",
            "Given out after registration; none of the copies on the hub holds questions with the "
            "abstracts that answer them. `query`: the question's body; `positive`: title and "
            "abstract of each document.",
            "http://participants-area.bioasq.org/datasets/",
        ),
    ),
)
"""Retrieval data sets of both versions."""

ADDED_RETRIEVAL = (
    Row(
        "hover",
        _CLAIM,
        17_000,
        own_folder(
            "hover",
            "hover-nlp/hover has 18,171 claims with the titles of the articles that they rest on, "
            "but not their text, which is HotpotQA's copy of Wikipedia. `query`: the claim; "
            "`positive`: those articles.",
            "https://hover-nlp.github.io",
        ),
    ),
    Row(
        "nfcorpus",
        "Given a question, retrieve relevant documents that answer the question",
        3_600,
        homes.beir("mteb/nfcorpus", "ec0fa4fe99da2ff19ca1214b7966684033a58814", "alike", ""),
    ),
    Row("miracl", _PASSAGES, 2_000, bge_e5("miracl_en", negatives=False, seen=False)),
    Row("mr-tydi", _PASSAGES, 2_000, bge_e5("mr_tydi_english", negatives=False)),
    Row(
        "scifact",
        "Given a scientific claim, retrieve documents that support or refute the claim",
        900,
        homes.beir("mteb/scifact", "d56462d0e63a25450459c4f213e49ffdb866f7f9", "seen", _BY_NC),
    ),
)
"""Retrieval data sets added in version 2 (section 5.2.5, "AD")."""

STS = (
    Row(
        "sts12",
        _SIMILAR,
        1_800,
        homes.sts(
            "mteb/sts12-sts",
            "train.jsonl.gz",
            "a0d554a64d88156834ff5ae9920b964011b16384",
            "seen",
            "File on stored pages; columns (sentence1, sentence2, score) as mteb reads them.",
        ),
    ),
    Row(
        "sts22",
        _SIMILAR,
        300,
        homes.sts(
            "mteb/sts22-crosslingual-sts",
            "en/train/*.parquet",
            "refs/convert/parquet",
            "alike",
            "English; scores from 1 to 4, so that only pairs with the highest stay. A folder for "
            "each language and split in the branch that the hub converts.",
        ),
    ),
    Row(
        "stsbenchmark",
        _SIMILAR,
        2_700,
        homes.sts(
            "mteb/stsbenchmark-sts",
            "train.jsonl.gz",
            "b0fddb56ed78048fa8b90373c8a3cfc37b684831",
            "alike",
            "As mteb/sts12-sts.",
        ),
    ),
)
"""Pairs with a score of 4 or more, in both directions; documents carry the instruction too."""
