"""The software that makes embeddings and scores, in a few characters.

Kept embeddings and result files carry it in what they are found by; see `models/code_version.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rayembed.config.document import fingerprint
from rayembed.config.graph import GraphConfig
from rayembed.config.model import ModelConfig
from rayembed.models.code_version import (
    foreign_modules,
    packages_of,
    source_version,
    vectors_software,
    versions,
)

_SPECS = (
    "evaluation/mteb_spec.py",
    "evaluation/rayembed_spec.py",
    "evaluation/sentence_spec.py",
)
"""Modules by which a model under test embeds, beside the forward pass."""

_READERS = (
    "data/hashes.py",
    "data/sources/beir_join.py",
    "data/sources/cells.py",
    "data/sources/csv_rows.py",
    "data/sources/files.py",
    "data/sources/names_beside.py",
    "data/sources/quote_check.py",
    "data/sources/rows.py",
    "data/sources/versions.py",
    "evaluation/own_data.py",
    "evaluation/own_tables.py",
)
"""Modules that read own sets."""

_SCORES = (
    *_READERS,
    "evaluation/air_bench",
    "evaluation/averages.py",
    "evaluation/benchmark_lines.py",
    "evaluation/benchmarks.py",
    "evaluation/bm25.py",
    "evaluation/jobs.py",
    "evaluation/model_spec.py",
    "evaluation/mteb_names.py",
    "evaluation/own_set.py",
    "evaluation/plan.py",
    "evaluation/pooled",
    "evaluation/prompt_tables.py",
    "evaluation/prompts.py",
    "results",
    "evaluation/run_scores.py",
    "evaluation/score.py",
    "evaluation/task_text.py",
    "quantisation.py",
    "search",
)
"""Modules that could change a score beside vectors."""


class CodeVersion(NamedTuple):
    """Two short names of the software of now."""

    vectors: str
    """Version of everything that could change a text's vector."""
    scores: str
    """Version of everything that could change a score, vectors included."""


_SCORING = ("mteb", "numpy", "scikit-learn", "scipy")
"""Packages by whose version a score of the same vectors could be another."""


def code_version(*packages: str, modules: Sequence[str] = ()) -> CodeVersion:
    """Version of the software that embeds with rayembed's own models, and scores.

    Args:
        packages: further ones that embed.
        modules: of other packages that embed, such as an architecture of the user's own.
    """
    vectors = fingerprint(vectors_software(_SPECS, packages=packages, modules=modules))
    return CodeVersion(vectors, fingerprint([vectors, versions(_SCORING), source_version(_SCORES)]))


def code_of(
    config: ModelConfig, graph: GraphConfig | None, *, quantised: bool = False
) -> CodeVersion:
    """Version of the software that embeds with a model of these settings, and scores.

    Args:
        graph: what computes it in the place of torch; None: nothing does.
        quantised: whether its weights are.
    """
    packages = packages_of(graph, quantised=quantised)
    return code_version(*packages, modules=foreign_modules([type(config)]))


def readers_version() -> str:
    """Version of the code that reads own sets, by which what it read is kept."""
    return source_version(_READERS)
