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

from collections.abc import Callable

from rayembed.config.data import DatasetConfig
from rayembed.config.mining import ConsistencyConfig, MiningConfig
from rayembed.data.mining.rules import PercPos
from rayembed.data.sources.pairs import PairsSource
from rayembed.recipes.data_recipes import Entry, Home
from rayembed_papers.mixtures.datasets.homes import NOMIC, home_named, hub, hub_page
from rayembed_papers.mixtures.datasets.nomic_pairs import PAIRS, config_of, home_of, prefixes
from rayembed_papers.printed import rows_of

_QUERY, _DOCUMENT = prefixes("search")

LANGUAGES = {row["language"]: int(row["pairs"]) for row in rows_of(__package__, "languages")}
"""Pairs of each language in Table 10 except English, both corpora together, after the filter."""

FINETUNING = {
    "msmarco": (485_120, "full/msmarco_passage"),
    "stack": (249_856, None),
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
"""Samples of Table 11, and the home if it has negatives."""

_STACK = Home(
    PairsSource(
        path=hub("flax-sentence-embeddings/stackexchange_title_body_jsonl", "*.jsonl.gz"),
        query="texts.0",
        positive="texts.1",
    ),
    hub_page("flax-sentence-embeddings/stackexchange_title_body_jsonl"),
    "seen",
    notes="Titles and bodies of questions, a file for each site; names of files and columns in "
    "public code that reads them.",
)


def pretraining_entries() -> tuple[Entry, ...]:
    """English pairs unchanged, and each language of mC4 and CC-News."""
    english = [
        Entry(
            config_of(pairs),
            NOMIC,
            "Table 10 (English)",
            home_of(pairs),
            pairs.num_pairs,
            "The paper counts English as a whole; these are CDE's counts of its "
            "parts, which add up to it.",
        )
        for pairs in PAIRS
    ]
    web = [
        _web(row["language"], home, corpus)
        for corpus, home in (("mc4", _mc4), ("cc-news", _cc_news))
        for row in rows_of(__package__, "languages")
        if corpus in row["corpora"].split()
    ]
    return (*english, *web)


def finetuning_entries() -> tuple[Entry, ...]:
    """BEIR and MIRACL training sets, with ten negatives of each query that the rule accepts."""
    return tuple(
        _finetuned(name, samples, home_named(home) if home else _STACK, given=home is not None)
        for name, (samples, home) in FINETUNING.items()
    )


def _web(code: str, home_of_language: Callable[[str], Home], corpus: str) -> Entry:
    home = home_of_language(code)
    config = DatasetConfig(
        name=f"{corpus}-{code}",
        source=home.source,
        query_instruction=_QUERY,
        document_instruction=_DOCUMENT,
        consistency=consistency(),
    )
    return Entry(
        config,
        NOMIC,
        "Table 10",
        home,
        LANGUAGES[code],
        "The count is that of the language in both corpora, after the filter.",
    )


def consistency() -> ConsistencyConfig:
    """Consistency filter of section 4.2; lengths are those of documents in pretraining (section
    4.3).
    """
    return ConsistencyConfig(
        teacher="hf://intfloat/multilingual-e5-small@main",
        max_length=256,
        query_prefix="query: ",
        document_prefix="passage: ",
        top_k=2,
        shard_rows=1_000_000,
    )


def _mc4(code: str) -> Home:
    revision = "1ddc917116b730e1859edef32896ec5c16be51d0"
    return Home(
        PairsSource(
            path=hub("allenai/c4", f"multilingual/c4-{code}.tfrecord-*.json.gz", revision),
            query="text.first_line",
            positive="text.other_lines",
            max_rejected_share=0.5,  # pages of one line, which Nomic's code leaves out too
        ),
        hub_page("allenai/c4"),
        "seen",
        "ODC-BY",
        "Names of files from stored pages, the split of title and text from Nomic's public code.",
    )


def _cc_news(code: str) -> Home:
    return Home(
        PairsSource(
            path=hub(
                "intfloat/multilingual_cc_news", f"{code}/train/*.parquet", "refs/convert/parquet"
            ),
            query="title",
            positive="maintext",
            max_rejected_share=0.5,  # articles without a title or a text
        ),
        hub_page("intfloat/multilingual_cc_news"),
        "seen",
        notes="A folder for each language in the branch that the hub converts, from stored pages; "
        "columns from Nomic's public code. Of very large languages the hub converts only the "
        "first files, then into the folder partial-train: set source.path.",
    )


def _finetuned(name: str, samples: int, home: Home, *, given: bool) -> Entry:
    mining = MiningConfig(
        teacher="hf://BAAI/bge-m3@main",
        max_length=512,
        rule=PercPos(max_relative_score=0.95),
        num_negatives=10,
        pool="given" if given else "corpus",
    )
    config = DatasetConfig(
        name=f"finetuning-{name}",
        source=home.source,
        query_instruction=_QUERY,
        document_instruction=_DOCUMENT,
        num_samples=samples,
        mining=mining,
    )
    return Entry(config, NOMIC, "Table 11", home, samples)
