"""Papers, and the homes of their data sets: where each is public, and how its rows are read.

`homes.csv` has a row for each home. Where a paper leaves open which public copy it took, it is the
one whose size is nearest to the table's. Splits of two repositories with the training data of
BGE-en-ICL are homes as well: `full/squad` of `cfli/bge-full-data`, which is all of it, and
`e5/eli5` of `cfli/bge-e5data`, the public part of what E5-Mistral was trained on, in more
languages. Each row of a split has `query`, `pos`, `neg` (lists of texts), `prompt` and scores.
"""

from functools import cache
from typing import Any

from rayembed.config.document import read_yaml
from rayembed.config.settings import Settings, parse
from rayembed.config.sources import SOURCES, Source
from rayembed.data.sources.pairs import PairsSource
from rayembed.recipes.data_recipes import Home, Paper
from rayembed_papers.printed import rows_of

NV_EMBED = Paper("NV-Embed", "nvembed", "2405.17428")
NOMIC = Paper("Nomic Embed v2", "nomic", "2502.07972")
CAUSAL2VEC = Paper("Causal2Vec", "causal2vec", "2507.23386")
CDE = Paper("CDE", "cde", "2410.02525")

_BGE = {
    "full": (
        *("cfli/bge-full-data", "78f5c99b534a52824ab26bd24edda592eaed4c7a"),
        "Columns from the repository's card; names of splits from the card and from the code of "
        "CDE, which reads every one of them by name.",
    ),
    "e5": (
        *("cfli/bge-e5data", "7a949e8f7db86ef52ce4b2d65cfde1a633f4ca75"),
        "Columns and splits from the repository's card and from pages of its files.",
    ),
}
"""Repository, revision and notes."""

_UNSEEN = frozenset({"e5/miracl_en", "e5/miracl_id", "e5/miracl_ja", "e5/miracl_ko"})
"""Splits whose names are on no stored page of the repository."""

_NOTES = {
    "beir": "Files and columns as on the card of mteb/hotpotqa and the pages of mteb/scifact.",
    "mteb": "Name, split and subset checked against the installed mteb, which pins the revision.",
    "classes": "Files on the page of mteb/raw_biorxiv; columns in public code that reads "
    "all three.",
}
"""Notes of homes without their own, by the kind of source."""


def hub(repository: str, inside: str, revision: str = "main") -> str:
    """Reference to the files of a hub data set."""
    return f"hf://datasets/{repository}@{revision}/{inside}"


def hub_page(repository: str) -> str:
    """Web page of a hub data set."""
    return f"https://huggingface.co/datasets/{repository}"


def home_named(name: str, *, negatives: bool = True) -> Home:
    """Home of `homes.csv`, or of a split of BGE's training data, several by a pattern.

    Args:
        negatives: whether the negatives of a split's rows are read.
    """
    which, _, split = name.partition("/")
    if not split:
        return _homes()[name]
    repository, revision, notes = _BGE[which]
    source = PairsSource(
        path=hub(repository, f"data/{split}-*.parquet", revision),
        positive="pos",
        negatives="neg" if negatives else None,
    )
    layout = "alike" if name in _UNSEEN else "seen"
    return Home(source, hub_page(repository), layout, notes=notes)


@cache
def _homes() -> dict[str, Home]:
    kinds = SOURCES.classes()
    return {row["name"]: _home(row, kinds) for row in rows_of(__package__, "homes")}


def _home(row: dict[str, str], kinds: dict[str, type[Settings]]) -> Home:
    settings: dict[str, Any] = read_yaml(row["source"])
    repository, kind = row["repository"], settings["kind"]
    at = {"repository": repository, "revision": row["revision"] or "main"}
    if row["files"]:
        settings["path"] = hub(inside=row["files"], **at)
    if kind == "beir":
        settings |= {name: hub(inside=f"{name}.jsonl", **at) for name in ("corpus", "queries")}
    source: Source = parse(kinds[kind], settings)  # type: ignore[assignment]
    url = repository if repository.startswith("http") else hub_page(repository)
    notes = row["notes"] or _NOTES[kind]
    return Home(source, url, row["layout"], row["licence"], notes)  # type: ignore[arg-type]
