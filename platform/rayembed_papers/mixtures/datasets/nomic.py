"""Data sets of Nomic Embed v2 (arXiv 2502.07972): Tables 10 and 11.

Pretraining: the English pairs of Nomic Embed as they are, and titles with texts of mC4 and of
multilingual CC-News, each language of each corpus a data set that is filtered for consistency.
Finetuning: training sets of BEIR and MIRACL with negatives, of which a rule keeps some.

How the paper is read where it leaves room:
- Table 10 counts the pairs of a language over both corpora and after the filter, so no data set has
  them as a number to draw: all is filtered, and the entries of a language show the same count.
- Which language is in which corpus is taken from the configuration in Nomic's public code, and so
  is mC4's title: the first line of a page.
- BGE-M3's training data is one archive of 24 GB on the hub. Its MIRACL rows are also in
  `cfli/bge-e5data`, by their counts: Table 11 has them in whole batches of 256 for all languages
  whose number of rows is known. The English sets are those of `cfli/bge-full-data`.
- Stack Exchange and SQuAD are said to be mined by the same rule; the teacher is BGE-M3 for all.
"""

from typing import Any

from rayembed.config.data import DatasetConfig
from rayembed.config.mining import MiningConfig
from rayembed.data.mining.rules import PercPos
from rayembed_extras.consistency.settings import ConsistencyConfig
from rayembed_papers.mixtures.datasets.entries import DatasetEntry
from rayembed_papers.mixtures.datasets.homes import NOMIC, home_named
from rayembed_papers.mixtures.datasets.nomic_pairs import PAIRS, config_of, home_of, prefixes
from rayembed_papers.printed import rows_of

_QUERY, _DOCUMENT = prefixes("search")

LANGUAGES = {row["language"]: int(row["pairs"]) for row in rows_of(__package__, "languages")}
"""Pairs of each language in Table 10 except English, both corpora together, after the filter."""

FINETUNING = {
    "msmarco": (485_120, "full/msmarco_passage"),
    "stack": (249_856, "stack"),
    "squad": (87_552, "full/squad"),
    "hotpot": (82_432, "full/hotpotqa"),
    "nq": (57_856, "full/nq"),
    "fever": (28_672, "full/fever"),
    "miracl-ru": (4_608, "e5/miracl_ru"),
    "miracl-id": (3_840, "e5/miracl_id"),
    "miracl-ar": (3_328, "e5/miracl_ar"),
    "miracl-ja": (3_328, "e5/miracl_ja"),
    "miracl-te": (3_328, "e5/miracl_te"),
    "miracl-fi": (2_816, "e5/miracl_fi"),
    "miracl-th": (2_816, "e5/miracl_th"),
    "miracl-en": (2_560, "e5/miracl_en"),
    "miracl-es": (2_048, "e5/miracl_es"),
    "miracl-fa": (2_048, "e5/miracl_fa"),
    "miracl-sw": (1_792, "e5/miracl_sw"),
    "miracl-bn": (1_536, "e5/miracl_bn"),
    "miracl-zh": (1_280, "e5/miracl_zh"),
    "miracl-fr": (1_024, "e5/miracl_fr"),
    "miracl-hi": (1_024, "e5/miracl_hi"),
    "miracl-ko": (768, "e5/miracl_ko"),
}
"""Samples of Table 11, and the home."""


def pretraining_entries() -> tuple[DatasetEntry, ...]:
    """Data sets of pretraining: the unchanged English pairs, and each language of mC4 and
    CC-News.
    """
    # The paper counts English as a whole; these are CDE's counts of its parts, which add up to it.
    english = [
        DatasetEntry(config_of(pairs), NOMIC, "Table 10 (English)", home_of(pairs), pairs.num_pairs)
        for pairs in PAIRS
    ]
    web = [
        _web(row["language"], corpus)
        for corpus in ("mc4", "cc-news")
        for row in rows_of(__package__, "languages")
        if corpus in row["corpora"].split()
    ]
    return (*english, *web)


def finetuning_entries() -> tuple[DatasetEntry, ...]:
    """Data sets of finetuning: training sets of BEIR and MIRACL, with ten mined negatives for each
    query.
    """
    return tuple(_finetuned(name, *row) for name, row in FINETUNING.items())


def _web(code: str, corpus: str) -> DatasetEntry:
    home = home_named(f"{corpus}/{code}")
    config = DatasetConfig(
        name=f"{corpus}-{code}",
        source=home.source,
        query_instruction=_QUERY,
        document_instruction=_DOCUMENT,
        **consistency(),
    )
    # The count is that of the language in both corpora, after the filter.
    return DatasetEntry(config, NOMIC, "Table 10", home, LANGUAGES[code])


def consistency() -> dict[str, Any]:
    """Settings of the consistency filter (section 4.2), with texts cut to the document lengths of
    pretraining.
    """
    asked = ConsistencyConfig(
        teacher="hf://intfloat/multilingual-e5-small@main",
        max_length=256,
        query_prefix="query: ",
        document_prefix="passage: ",
        top_k=2,
        shard_rows=1_000_000,
    )
    return {asked.kind: asked}


def _finetuned(name: str, samples: int, home_name: str) -> DatasetEntry:
    home = home_named(home_name)
    mining = MiningConfig(
        teacher="hf://BAAI/bge-m3@main",
        max_length=512,
        rule=PercPos(max_relative_score=0.95),
        num_negatives=10,
        pool="given" if getattr(home.source, "negatives", None) else "corpus",
    )
    config = DatasetConfig(
        name=f"finetuning-{name}",
        source=home.source,
        query_instruction=_QUERY,
        document_instruction=_DOCUMENT,
        num_samples=samples,
        mining=mining,
    )
    return DatasetEntry(config, NOMIC, "Table 11", home, samples)
