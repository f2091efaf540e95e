"""English pretraining pairs of Nomic Embed: CDE's Table 5, and the English part of Table 10.

One repository holds them, a split for each data set, already filtered for consistency by Nomic
(arXiv 2402.01613). Prefixes are those of the configuration in Nomic's public code, which CDE's
takes over.
"""

from dataclasses import dataclass
from typing import Literal

from rayembed.config.data import DatasetConfig
from rayembed.config.mining import ClusterConfig
from rayembed_papers.mixtures.datasets.entries import Home
from rayembed_papers.mixtures.datasets.homes import home_named

Use = Literal["search", "clustering", "classification"]


@dataclass(frozen=True)
class Pairs:
    """A row of CDE's Table 5: a data set of pairs."""

    split: str
    """Split of the repository."""
    use: Use
    """Prefixes of its texts."""
    num_pairs: int


PAIRS = (
    Pairs("reddit_title_body", "clustering", 64_978_944),
    Pairs("paq", "search", 52_953_088),
    Pairs("amazon_reviews", "classification", 38_682_624),
    Pairs("s2orc_title_abstract", "clustering", 35_438_592),
    Pairs("wikianswers", "classification", 9_912_320),
    Pairs("s2orc_citation_titles", "clustering", 7_585_792),
    Pairs("s2orc_abstract_citation", "clustering", 7_503_872),
    Pairs("s2orc_abstract_body", "clustering", 6_389_760),
    Pairs("wikipedia", "classification", 6_078_464),
    Pairs("gooaq", "search", 1_245_184),
    Pairs("codesearch", "clustering", 835_584),
    Pairs("agnews", "classification", 409_600),
    Pairs("ccnews", "classification", 344_064),
    Pairs("npr", "classification", 344_064),
    Pairs("cnn", "classification", 278_528),
    Pairs("yahoo_title_answer", "search", 262_144),
    Pairs("amazonqa", "search", 212_992),
    Pairs("yahoo_title_question", "search", 196_608),
    Pairs("sentence_compression", "classification", 163_840),
    Pairs("yahoo_qa", "search", 131_072),
    Pairs("eli5", "search", 98_304),
    Pairs("altlex", "classification", 98_304),
    Pairs("wikihow", "classification", 81_920),
    Pairs("simplewiki", "classification", 81_920),
    Pairs("stackexchange_duplicate_questions", "clustering", 65_536),
    Pairs("stackexchange_title_body", "clustering", 65_536),
    Pairs("stackexchange_body_body", "clustering", 65_536),
    Pairs("quora", "classification", 32_768),
    Pairs("squad", "search", 16_384),
)
"""All rows; together 234,553,344 pairs, the number for English in Table 10 of Nomic Embed v2."""


def prefixes(use: Use) -> tuple[str, str]:
    """Return the text prefixes of queries and of documents for a data set of pairs."""
    if use == "search":
        return "search_query: ", "search_document: "
    return f"{use}: ", f"{use}: "


def home_of(pairs: Pairs) -> Home:
    """Return where the rows of a split are published."""
    return home_named(f"nomic/{pairs.split}")


def config_of(pairs: Pairs, clusters: ClusterConfig | None = None) -> DatasetConfig:
    """Build the data set of a split, with the table's number of pairs and its prefixes."""
    query, document = prefixes(pairs.use)
    return DatasetConfig(
        name=pairs.split.replace("_", "-"),
        source=home_of(pairs).source,
        query_instruction=query,
        document_instruction=document,
        num_samples=pairs.num_pairs,
        clusters=clusters,
    )
