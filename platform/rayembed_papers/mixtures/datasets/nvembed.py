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
from functools import cache
from typing import Literal

from rayembed.config.data import DatasetConfig, TaskKind
from rayembed.config.mining import CleaningConfig, Corpus, MiningConfig, Overlap, Rule
from rayembed.config.sources import Source
from rayembed.data.mining.rules import PercPos, TopK
from rayembed.data.sources.beir import BeirSource
from rayembed.data.sources.classes import ClassesSource, LabelForm
from rayembed.data.sources.earlier import RecordsSource
from rayembed.data.sources.pairs import PairsSource
from rayembed_papers.mixtures.datasets.entries import DatasetEntry, Home
from rayembed_papers.mixtures.datasets.homes import NV_EMBED, home_named
from rayembed_papers.printed import rows_of
from rayembed_papers.sources.mteb import MtebSource

Kind = Literal["retrieval", "added", "sts", "labelled", "multi-class", "clustering"]
"""Kinds of rows of Table 12:

retrieval    retrieval of both versions
added        retrieval of version 2 alone (section 5.2.5, "AD")
sts          pairs with a score of 4 or more, in both directions; documents are instructed too
labelled     classification, documents are names of classes in both versions
multi-class  classification of Table 5: documents are examples in version 2, names in version 1
clustering   as `multi-class`
"""


@dataclass(frozen=True)
class Table12Row:
    """A row of Table 12, from `nvembed.csv`."""

    name: str
    kind: Kind
    instruction: str
    num_samples: int
    home: str
    other_home: str
    """Home of a copy with negatives, or of examples of classes; empty without one."""
    benchmark: str
    """mteb task that evaluates its classes and whose texts must not be in training; else empty."""


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


def uniform_over_samples(datasets: tuple[DatasetConfig, ...]) -> dict[str, float]:
    """Weight a stage's data sets by size, so that every sample is drawn equally often.

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
            raise ValueError(
                f"the data set {dataset.name!r} has no num_samples, which the mixture needs as "
                "its weight"
            )
        weights[dataset.name] = float(dataset.num_samples)
    return weights


def entries() -> tuple[DatasetEntry, ...]:
    """All data sets of the table as in version 2, classification ones also with class names as
    documents.
    """
    return (
        *retrieval_entries(mined=True, added=True, synthetic=True),
        *other_entries(mined=True, labels="example"),
        *(_classes(row, labels="label") for row in _rows("multi-class", "clustering")),
    )


@cache
def table_rows() -> tuple[Table12Row, ...]:
    """All rows of Table 12, in its order."""
    return tuple(
        Table12Row(
            name=row["name"],
            kind=row["kind"],  # type: ignore[arg-type]
            instruction=row["instruction"],
            num_samples=int(row["samples"]),
            home=row["home"],
            other_home=row["other_home"],
            benchmark=row["benchmark"],
        )
        for row in rows_of(__package__, "nvembed")
    )


def _rows(*kinds: Kind) -> list[Table12Row]:
    return [row for row in table_rows() if row.kind in kinds]


def retrieval_entries(*, mined: bool, added: bool, synthetic: bool) -> list[DatasetEntry]:
    """Data sets of the first stage.

    Args:
        mined: negatives by the positive-aware rule from the teacher ("HN"), else those that public
            copies bring, or the teacher's first ones.
        added: with the data sets that version 2 added ("AD").
        synthetic: with the synthetic data set ("SD").
    """
    rows = [*_rows("retrieval"), *(_rows("added") if added else ())]
    found = [_paired(row, mined=mined) for row in rows]
    if synthetic:
        config = DatasetConfig(
            name="synthetic", source=_SYNTHETIC.source, num_samples=NUM_SYNTHETIC
        )
        found.append(DatasetEntry(config, NV_EMBED, "section 4.3", _SYNTHETIC, NUM_SYNTHETIC))
    return found


def other_entries(*, mined: bool, labels: LabelForm) -> list[DatasetEntry]:
    """Data sets that only the second stage has: STS, classification, clustering."""
    return [
        *(_paired(row, mined=mined) for row in _rows("sts")),
        *(_classes(row, labels="label") for row in _rows("labelled")),
        *(_classes(row, labels=labels) for row in _rows("multi-class", "clustering")),
    ]


def _paired(row: Table12Row, *, mined: bool) -> DatasetEntry:
    symmetric = row.kind == "sts"
    given = bool(row.other_home) and not mined
    home = home_named(row.other_home if given else row.home, negatives=given)
    rule: Rule = PercPos(max_relative_score=0.95) if mined else TopK()
    config = DatasetConfig(
        name=row.name,
        source=home.source,
        task="sts" if symmetric else "retrieval",
        query_instruction=row.instruction,
        document_instruction=row.instruction if symmetric else "",
        num_samples=row.num_samples,
        mining=None if given else _mining(row, home.source, rule, symmetric=symmetric),
    )
    return DatasetEntry(config, NV_EMBED, _TABLE, home, row.num_samples)


def _mining(row: Table12Row, source: Source, rule: Rule, *, symmetric: bool) -> MiningConfig:
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


def _classes(row: Table12Row, *, labels: LabelForm) -> DatasetEntry:
    examples = bool(row.other_home) and labels == "example"
    home = home_named(row.other_home if examples else row.home)
    source = home.source
    if isinstance(source, ClassesSource | MtebSource):
        source = source.model_copy(update={"label_form": labels})
    task: TaskKind = "clustering" if row.kind == "clustering" else "classification"
    config = DatasetConfig(
        name=f"{row.name}-{labels}s",
        source=source,
        task=task,
        query_instruction=row.instruction,
        num_samples=row.num_samples,
        cleaning=_cleaning(row, task, given=isinstance(source, PairsSource)),
    )
    return DatasetEntry(config, NV_EMBED, _TABLE, home, row.num_samples)


def _cleaning(row: Table12Row, task: TaskKind, *, given: bool) -> CleaningConfig:
    """Choose the cleaning of section 4.2: remove benchmark texts, for two data sets also similar
    ones.

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
