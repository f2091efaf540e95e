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

from rayembed.config.data import DatasetConfig
from rayembed.config.mining import ConsistencyConfig, MiningConfig
from rayembed.data.mining.rules import PercPos
from rayembed.data.sources.pairs import PairsSource
from rayembed.recipes.data_recipes import Entry, Home
from rayembed_papers.mixtures.datasets.bge import bge_e5, bge_full
from rayembed_papers.mixtures.datasets.entry import NOMIC, hub, hub_page
from rayembed_papers.mixtures.datasets.nomic_pairs import PAIRS, config_of, home_of, prefixes

_QUERY, _DOCUMENT = prefixes("search")

LANGUAGES = {
    "es": 210_010_112,
    "fr": 172_769_280,
    "de": 169_426_944,
    "it": 104_251_392,
    "pt": 87_982_080,
    "pl": 63_209_472,
    "nl": 50_118_656,
    "tr": 49_053_696,
    "ja": 43_433_984,
    "vi": 40_058_880,
    "ru": 38_731_776,
    "id": 36_470_784,
    "ar": 33_800_192,
    "cs": 29_966_336,
    "ro": 24_772_608,
    "sv": 24_608_768,
    "el": 22_773_760,
    "uk": 19_841_024,
    "zh": 18_661_376,
    "hu": 18_448_384,
    "da": 14_548_992,
    "no": 12_812_288,
    "hi": 12_713_984,
    "fi": 12_697_600,
    "bg": 12_042_240,
    "ko": 10_354_688,
    "sk": 8_962_048,
    "th": 7_602_176,
    "iw": 5_783_552,
    "ca": 5_701_632,
    "lt": 5_242_880,
    "fa": 5_177_344,
    "ms": 4_325_376,
    "sl": 4_259_840,
    "lv": 3_211_264,
    "mr": 2_588_672,
    "bn": 2_457_600,
    "sq": 2_113_536,
    "cy": 2_048_000,
    "be": 589_824,
    "ml": 557_056,
    "kn": 524_288,
    "mk": 425_984,
    "ur": 409_600,
    "fy": 393_216,
    "fil": 360_448,
    "te": 360_448,
    "eu": 344_064,
    "sw": 327_680,
    "so": 294_912,
    "sd": 262_144,
    "uz": 262_144,
    "co": 245_760,
    "hr": 245_760,
    "gu": 229_376,
    "hi-Latn": 229_376,
    "ceb": 196_608,
    "eo": 196_608,
    "jv": 196_608,
    "la": 196_608,
    "zu": 196_608,
    "mn": 180_224,
    "si": 180_224,
    "el-Latn": 163_840,
    "ga": 163_840,
    "ky": 163_840,
    "tg": 163_840,
    "my": 147_456,
    "km": 131_072,
    "mg": 131_072,
    "pa": 131_072,
    "ru-Latn": 131_072,
    "sn": 131_072,
    "zh-Latn": 131_072,
    "ha": 98_304,
    "he": 98_304,
    "hmn": 98_304,
    "ht": 98_304,
    "ja-Latn": 98_304,
    "su": 98_304,
    "bg-Latn": 65_536,
    "gd": 65_536,
    "ny": 65_536,
    "ps": 65_536,
    "ku": 49_152,
    "sh": 49_152,
    "am": 32_768,
    "ig": 32_768,
    "lo": 32_768,
    "mi": 32_768,
    "nn": 32_768,
    "sm": 32_768,
    "yi": 32_768,
    "st": 16_384,
    "tl": 16_384,
    "xh": 16_384,
    "yo": 16_384,
}
"""Pairs of each language in Table 10 except English, both corpora together, after the filter."""

_ONLY_MC4 = (
    "ru-Latn",
    "sn",
    "fil",
    "zh-Latn",
    "ha",
    "hmn",
    "ja-Latn",
    "bg-Latn",
    "ny",
    "hi-Latn",
    "ig",
    "zu",
    "mi",
    "el-Latn",
    "sm",
    "st",
    "xh",
    "iw",
)
_ONLY_CC_NEWS = ("he", "hr", "sh", "nn", "tl")

FINETUNING = {
    "msmarco": (485_120, bge_full("msmarco_passage")),
    "stack": (249_856, None),
    "squad": (87_552, bge_full("squad")),
    "hotpot": (82_432, bge_full("hotpotqa")),
    "nq": (57_856, bge_full("nq")),
    "fever": (28_672, bge_full("fever")),
    "miracl-ru": (4_608, bge_e5("miracl_ru")),
    "miracl-id": (3_840, bge_e5("miracl_id", seen=False)),
    "miracl-ar": (3_328, bge_e5("miracl_ar")),
    "miracl-ja": (3_328, bge_e5("miracl_ja", seen=False)),
    "miracl-te": (3_328, bge_e5("miracl_te")),
    "miracl-fi": (2_816, bge_e5("miracl_fi")),
    "miracl-th": (2_816, bge_e5("miracl_th")),
    "miracl-en": (2_560, bge_e5("miracl_en", seen=False)),
    "miracl-es": (2_048, bge_e5("miracl_es")),
    "miracl-fa": (2_048, bge_e5("miracl_fa")),
    "miracl-sw": (1_792, bge_e5("miracl_sw")),
    "miracl-bn": (1_536, bge_e5("miracl_bn")),
    "miracl-zh": (1_280, bge_e5("miracl_zh")),
    "miracl-fr": (1_024, bge_e5("miracl_fr")),
    "miracl-hi": (1_024, bge_e5("miracl_hi")),
    "miracl-ko": (768, bge_e5("miracl_ko", seen=False)),
}
"""Samples of Table 11, and the location if it has negatives."""

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
    mc4 = [_web(code, _mc4(code), "mc4") for code in LANGUAGES if code not in _ONLY_CC_NEWS]
    news = [_web(code, _cc_news(code), "cc-news") for code in LANGUAGES if code not in _ONLY_MC4]
    return (*english, *mc4, *news)


def finetuning_entries() -> tuple[Entry, ...]:
    """BEIR and MIRACL training sets, with ten negatives of each query that the rule accepts."""
    return tuple(
        _finetuned(name, samples, home or _STACK, given=home is not None)
        for name, (samples, home) in FINETUNING.items()
    )


def _web(code: str, home: Home, corpus: str) -> Entry:
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
