"""Two repositories with the training data of BGE-en-ICL, source of several papers' data sets.

`cfli/bge-full-data` is all of it, what CDE is finetuned on; `cfli/bge-e5data` is the public part of
what E5-Mistral was trained on, in more languages. Both have a split for each data set and in each
row `query`, `pos`, `neg` (lists of texts), `prompt` and scores.
"""

from rayembed.data.sources.pairs import PairsSource
from rayembed.recipes.data_recipes import Home
from rayembed_papers.mixtures.datasets.entry import hub, hub_page

_FULL, _FULL_REVISION = "cfli/bge-full-data", "78f5c99b534a52824ab26bd24edda592eaed4c7a"
_E5, _E5_REVISION = "cfli/bge-e5data", "7a949e8f7db86ef52ce4b2d65cfde1a633f4ca75"

_SEEN = (
    "Columns from the repository's card; names of splits from the card and from the code of CDE, "
    "which reads every one of them by name."
)


def bge_full(split: str, *, negatives: bool = True) -> Home:
    """A split of `cfli/bge-full-data`, with or without the negatives of its rows."""
    return Home(
        PairsSource(
            path=hub(_FULL, f"data/{split}-*.parquet", _FULL_REVISION),
            positive="pos",
            negatives="neg" if negatives else None,
        ),
        hub_page(_FULL),
        "seen",
        notes=_SEEN,
    )


def bge_e5(split: str, *, negatives: bool = True, seen: bool = True) -> Home:
    """A split of `cfli/bge-e5data`, or several by a pattern.

    Args:
        seen: whether the split's name is on a stored page of the repository.
    """
    return Home(
        PairsSource(
            path=hub(_E5, f"data/{split}-*.parquet", _E5_REVISION),
            positive="pos",
            negatives="neg" if negatives else None,
        ),
        hub_page(_E5),
        "seen" if seen else "alike",
        notes="Columns and splits from the repository's card and from pages of its files.",
    )
