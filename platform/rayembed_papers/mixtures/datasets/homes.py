"""For each paper, list its data sets with their public address and row format.

`homes.csv` has a row for each home. Where a paper leaves open which public copy it took, it is the
one whose size is nearest to the table's. Where a repository has many data sets, `REPOSITORY/SPLIT`
names one of them, which stands for the braces in the names of its files. Two have the training data
of BGE-en-ICL: `full/squad` is of `cfli/bge-full-data`, which is all of it, and `e5/eli5` of
`cfli/bge-e5data`, the public part of what E5-Mistral was trained on, in more languages; each of
their rows has `query`, `pos`, `neg` (lists of texts), `prompt` and scores. Half of the rows of mC4
and CC-News may be rejected: pages of one line, which Nomic's code leaves out too, and articles
without a title or a text.
"""

from functools import cache
from typing import Any

from rayembed.config.document import read_yaml
from rayembed.config.settings import Settings, parse
from rayembed.config.sources import SOURCES, Source
from rayembed_papers.mixtures.datasets.entries import Home, Paper
from rayembed_papers.printed import rows_of

NV_EMBED = Paper("NV-Embed", "nvembed", "2405.17428")
NOMIC = Paper("Nomic Embed v2", "nomic", "2502.07972")
CAUSAL2VEC = Paper("Causal2Vec", "causal2vec", "2507.23386")
CDE = Paper("CDE", "cde", "2410.02525")

_UNSEEN = frozenset({"e5/miracl_en", "e5/miracl_id", "e5/miracl_ja", "e5/miracl_ko"})
"""Splits whose names are not documented in the repository."""

_NOTES = {
    "beir": "Files and columns as on the card of mteb/hotpotqa and the pages of mteb/scifact.",
    "mteb": "Name, split and subset checked against the installed mteb, which pins the revision.",
    "classes": "Files on the page of mteb/raw_biorxiv; columns in public code that reads "
    "all three.",
}
"""Notes on homes without their own note, by kind of source."""


def home_named(name: str, *, negatives: bool = True) -> Home:
    """Look up where rows are published: an entry of `homes.csv`, or a split of a
    repository.

    Args:
        negatives: whether the negatives of rows that have some are read.
    """
    first, _, split = name.partition("/")
    row = _rows()[first]
    settings: dict[str, Any] = read_yaml(row["source"])
    repository, kind = row["repository"], settings["kind"]
    folder = f"hf://datasets/{repository}@{row['revision'] or 'main'}"
    if row["files"]:
        settings["path"] = f"{folder}/{row['files'].format(split)}"
    if kind == "beir":
        settings |= {side: f"{folder}/{side}.jsonl" for side in ("corpus", "queries")}
    if not negatives:
        settings.pop("negatives", None)
    source: Source = parse(_kinds()[kind], settings)  # type: ignore[assignment]
    url = (
        repository
        if repository.startswith("http")
        else f"https://huggingface.co/datasets/{repository}"
    )
    layout = "alike" if name in _UNSEEN else row["layout"]
    notes = row["notes"] or _NOTES[kind]
    return Home(source, url, layout, row["licence"], notes)  # type: ignore[arg-type]


@cache
def _rows() -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in rows_of(__package__, "homes")}


@cache
def _kinds() -> dict[str, type[Settings]]:
    return SOURCES.classes()
