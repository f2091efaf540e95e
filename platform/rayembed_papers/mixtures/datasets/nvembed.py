"""Data sets of NV-Embed: Table 12 of arXiv 2405.17428, row by row.

Names end in `-labels` where documents are names of classes, and in `-examples` where they are other
examples of the classes (section 5.2.4), because the two are different records.

How the table is read where it leaves room:
- Natural Language Inference has one count (270k) and two instructions: two data sets of 135k.
- PAQ and MSMARCO share one cell with two counts and three instructions. Table 13 evaluates MSMARCO
  with the web-search one; PAQ gets the two others, 250k each.
- Reddit and Stackexchange clustering carry the instruction of Medrxiv, obviously a slip (Table 13
  evaluates them with others). What the paper prints is kept, so that the recipe is the paper's.
- Counts such as "16k" are taken as round numbers. Some count judgements rather than queries (the
  170k of HotpotQA are two each of 85k questions); a data set with fewer records gives all it has,
  its weight in a stage is the table's, and a query that is drawn twice trains two of its positives.
- MIRACL and Mr.TyDi have the size of their English parts.
- Version 1 has no positive-aware mining. Its negatives are those that public copies of the data
  bring; where none does, the first ones that the teacher finds, whatever they score.
"""

from dataclasses import dataclass

from rayembed.config.data import DatasetConfig, TaskKind
from rayembed.config.mining import CleaningConfig, Corpus, MiningConfig, Overlap, Rule
from rayembed.config.sources import Source
from rayembed.data.mining.rules import PercPos, TopK
from rayembed.data.sources.beir import BeirSource
from rayembed.data.sources.classes import ClassesSource, LabelForm
from rayembed.data.sources.earlier import RecordsSource
from rayembed.data.sources.mteb import MtebSource
from rayembed.data.sources.pairs import PairsSource
from rayembed.recipes.data_recipes import Entry, Home
from rayembed_papers.mixtures.datasets import nvembed_homes as homes
from rayembed_papers.mixtures.datasets.bge import bge_e5, bge_full
from rayembed_papers.mixtures.datasets.entry import NV_EMBED, own_folder
from rayembed_papers.mixtures.datasets.nvembed_classes import (
    CLUSTERING,
    LABELLED,
    MULTI_CLASS,
    ClassRow,
)


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


TEACHER = "hf://intfloat/e5-mistral-7b-instruct@main"
"""Teacher model of section 4.1.1."""

BENCHMARK_SIMILARITY = 0.8
"""BM25 similarity above which rows of Emotion and AmazonCounterfactual are dropped; section 4.2
uses such a limit without stating it."""


NUM_SYNTHETIC = 120_000
"""Number of synthetic pairs in section 4.3: 60,000 tasks, each with its own instruction."""

_TABLE = "Table 12"

_SYNTHETIC = Home(
    RecordsSource(path="synthetic/"),
    "",
    "own",
    notes="Not public. Written by the synthesis job (section 4.3); put its folder, the one with "
    "manifest.json, below data.root or set source.path.",
)


def retrieval_datasets(*, mined: bool, added: bool, synthetic: bool) -> tuple[DatasetConfig, ...]:
    """Data sets of the first stage.

    Args:
        mined: negatives by the positive-aware rule from the teacher ("HN"), else those that public
            copies bring, or the teacher's first ones.
        added: with the data sets that version 2 added ("AD").
        synthetic: with the synthetic data set ("SD").
    """
    found = _retrieval_entries(mined=mined, added=added, synthetic=synthetic)
    return tuple(entry.config for entry in found)


def other_datasets(*, mined: bool, labels: LabelForm) -> tuple[DatasetConfig, ...]:
    """Additional data sets of the second stage: STS, classification, clustering."""
    return tuple(entry.config for entry in _other_entries(mined=mined, labels=labels))


def uniform_over_samples(datasets: tuple[DatasetConfig, ...]) -> dict[str, float]:
    """Stage weights by which every sample is drawn equally often.

    "Training samples from different datasets in Table 12 are uniformly sampled" (appendix C) is
    read as uniform over samples. The steps agree: 20k steps of 128 are 1.3 passes over the 2.0M
    samples of stage 1, 18k steps 0.9 passes over the 2.6M of stage 2. Uniform over data sets
    would show the 0.9k rows of SciFact some 150 times in stage 1.

    Raises:
        ValueError: a data set has no number of samples.
    """
    weights = {}
    for dataset in datasets:
        if dataset.num_samples is None:
            raise ValueError(f"the data set {dataset.name!r} has no num_samples")
        weights[dataset.name] = float(dataset.num_samples)
    return weights


def entries() -> tuple[Entry, ...]:
    """All rows of the table as in version 2, and classification ones also with class names."""
    by_labels = (*MULTI_CLASS, *CLUSTERING)
    return (
        *_retrieval_entries(mined=True, added=True, synthetic=True),
        *_other_entries(mined=True, labels="example"),
        *(_classes(row, labels="label", task=_task(row)) for row in by_labels),
    )


def _retrieval_entries(*, mined: bool, added: bool, synthetic: bool) -> list[Entry]:
    rows = RETRIEVAL + (ADDED_RETRIEVAL if added else ())
    found = [_paired(row, task="retrieval", mined=mined) for row in rows]
    if synthetic:
        config = DatasetConfig(
            name="synthetic", source=_SYNTHETIC.source, num_samples=NUM_SYNTHETIC
        )
        found.append(Entry(config, NV_EMBED, "section 4.3", _SYNTHETIC, NUM_SYNTHETIC))
    return found


def _other_entries(*, mined: bool, labels: LabelForm) -> list[Entry]:
    return [
        *(_paired(row, task="sts", mined=mined) for row in STS),
        *(_classes(row, task="classification", labels="label") for row in LABELLED),
        *(_classes(row, task="classification", labels=labels) for row in MULTI_CLASS),
        *(_classes(row, task="clustering", labels=labels) for row in CLUSTERING),
    ]


def _task(row: ClassRow) -> TaskKind:
    return "clustering" if row in CLUSTERING else "classification"


def _paired(row: Row, *, task: TaskKind, mined: bool) -> Entry:
    symmetric = task == "sts"
    given = None if mined else row.given
    home = row.home if given is None else given
    rule: Rule = PercPos(max_relative_score=0.95) if mined else TopK()
    config = DatasetConfig(
        name=row.name,
        source=home.source,
        task=task,
        query_instruction=row.instruction,
        document_instruction=row.instruction if symmetric else "",
        num_samples=row.num_samples,
        mining=_mining(row, home.source, rule, symmetric=symmetric) if given is None else None,
    )
    return Entry(config, NV_EMBED, _TABLE, home, row.num_samples)


def _mining(row: Row, source: Source, rule: Rule, *, symmetric: bool) -> MiningConfig:
    prefix = f"Instruct: {row.instruction}\nQuery: "
    corpus = (
        Corpus(path=source.corpus, text="title+text") if isinstance(source, BeirSource) else None
    )
    return MiningConfig(
        teacher=TEACHER,
        num_negatives=7,
        rule=rule,
        max_length=512,
        query_prefix=prefix,
        document_prefix=prefix if symmetric else "",
        corpus=corpus,
    )


def _classes(row: ClassRow, *, task: TaskKind, labels: LabelForm) -> Entry:
    home = row.examples if row.examples is not None and labels == "example" else row.home
    source = home.source
    if isinstance(source, ClassesSource | MtebSource):
        source = source.model_copy(update={"label_form": labels})
    config = DatasetConfig(
        name=f"{row.name}-{labels}s",
        source=source,
        task=task,
        query_instruction=row.instruction,
        num_samples=row.num_samples,
        cleaning=_cleaning(row, task, given=isinstance(source, PairsSource)),
    )
    return Entry(config, NV_EMBED, _TABLE, home, row.num_samples)


def _cleaning(row: ClassRow, task: TaskKind, *, given: bool) -> CleaningConfig:
    """Cleaning of section 4.2: benchmark texts, for two data sets similar ones too.

    Args:
        given: whether rows bring their negatives; drawn ones are never benchmark texts.
    """
    if row.name in ("emotion", "amazon-counterfactual"):
        similarity: float | None = BENCHMARK_SIMILARITY
    elif task == "clustering":
        similarity = None
    else:
        return CleaningConfig()
    return CleaningConfig(
        overlap=Overlap(tasks=(row.benchmark,), max_similarity=similarity, negatives=given)
    )
