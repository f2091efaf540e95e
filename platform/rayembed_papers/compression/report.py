"""Tables of the measurement beside the paper's, and which of its orderings hold here."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rayembed.paired import difference
from rayembed.tables import Table
from rayembed_papers.compression import figures
from rayembed_papers.compression.figures import METHODS, STRUCTURES
from rayembed_papers.compression.measure import BASE, Cell

Scores = Mapping[int, Mapping[Cell, float]]
"""Seed → cell → score."""

_NOTHING = 0.005
"""Loss that counts as none: half a point of a hundred."""


@dataclass(frozen=True)
class Ordering:
    """A direction that the paper reports: one cell scores at least what another does."""

    claim: str
    better: Callable[[str, str], Cell]
    """The cell of a method and a structure that is expected to be ahead."""
    worse: Callable[[str, str], Cell]
    methods: Sequence[str] = METHODS
    loses_nothing: bool = False
    """Whether the claim is that at most half a point of a hundred is lost."""


ORDERINGS = (
    Ordering(
        "SparseGPT > Wanda, pruned",
        lambda _, structure: Cell("sparsegpt", structure),
        lambda _, structure: Cell("wanda", structure),
        ("",),
    ),
    Ordering(
        "Wanda > magnitude, pruned",
        lambda _, structure: Cell("wanda", structure),
        lambda _, structure: Cell("magnitude", structure),
        ("",),
    ),
    Ordering(
        "re-trained > pruned",
        lambda method, structure: Cell(method, structure, "labels"),
        Cell,
    ),
    Ordering(
        "labels and distillation > labels",
        lambda method, structure: Cell(method, structure, "distilled"),
        lambda method, structure: Cell(method, structure, "labels"),
    ),
    Ordering(
        "INT8 loses nothing",
        lambda _, structure: Cell("gptq", structure),
        lambda _, structure: Cell("sparsegpt", structure, "distilled"),
        ("",),
        loses_nothing=True,
    ),
    Ordering(
        "FP8 loses nothing",
        lambda _, structure: Cell("fp8", structure),
        lambda _, structure: Cell("sparsegpt", structure, "distilled"),
        ("",),
        loses_nothing=True,
    ),
)
"""What appendix A says of its Tables 6 to 8."""


def score_table(scores: Scores) -> Table:
    """Methods and recoveries in rows, structures in columns: mean over seeds, ± their standard
    deviation, and the paper's figure in brackets.
    """
    rows: list[list[object]] = [["none", _cell(scores, BASE, None), "", ""]]
    for method in METHODS:
        printed: Mapping[str, Mapping[tuple[str, str], float]] = {
            "": figures.PRUNED,
            "labels": figures.RETRAINED,
            "distilled": figures.DISTILLED,
        }
        for recovery, of_paper in printed.items():
            label = {"": "pruned", "labels": "re-trained", "distilled": "re-trained, distilled"}
            cells = [
                _cell(scores, Cell(method, one, recovery), of_paper.get((method, one)))
                for one in STRUCTURES
            ]
            rows.append([f"{method}, {label[recovery]}", *cells])
    for kind, name in (("gptq", "INT8 by GPTQ"), ("fp8", "FP8 (E4M3)")):
        cells = [_cell(scores, Cell(kind, s), figures.QUANTISED[kind, s]) for s in STRUCTURES]
        rows.append([f"sparsegpt, distilled, {name}", *cells])
    return Table(["model", *STRUCTURES], rows, title="NV-Embed's Tables 6 to 8", align="lr")


def _cell(scores: Scores, cell: Cell, printed: float | None) -> str:
    values = [seed[cell] for seed in scores.values() if cell in seed]
    if not values:
        return ""
    told = f"{statistics.mean(values):.4f}"
    if len(values) > 1:
        told += f" ± {statistics.stdev(values):.4f}"
    return told if printed is None else f"{told} ({printed:g})"


def ordering_table(scores: Scores) -> Table:
    """Each direction with its difference by seed, 95 % interval and verdict."""
    rows = []
    for ordering in ORDERINGS:
        differences = [
            apart for seed in scores.values() if (apart := _apart(ordering, seed)) is not None
        ]
        rows.append([ordering.claim, *_judged(differences, ordering.loses_nothing)])
    heads = ["direction", "difference by seed", "verdict"]
    return Table(heads, rows, title="Directions of the paper", align="lrl", look="open")


def _apart(ordering: Ordering, seed: Mapping[Cell, float]) -> float | None:
    """Mean over methods and structures, of those that are measured; None: none is."""
    pairs = [
        (ordering.better(method, structure), ordering.worse(method, structure))
        for method in ordering.methods
        for structure in STRUCTURES
    ]
    found = [seed[one] - seed[other] for one, other in pairs if one in seed and other in seed]
    return statistics.mean(found) if found else None


def _judged(differences: Sequence[float], loses_nothing: bool) -> tuple[str, str]:
    """Difference with its interval and seeds above 0, and whether the direction holds."""
    if not differences:
        return "", "not measured"
    found = difference(differences)
    return found.text(), found.verdict(-_NOTHING if loses_nothing else 0.0)
