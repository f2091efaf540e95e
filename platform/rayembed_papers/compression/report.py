"""Tables of the measurement beside the paper's, and which directions hold here."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rayembed.display.tables import Table
from rayembed.evaluation.paired import difference
from rayembed_papers.compression import figures
from rayembed_papers.compression.figures import METHODS, STRUCTURES
from rayembed_papers.compression.measure import BASE, Cell

Scores = Mapping[int, Mapping[Cell, float]]
"""Seed → cell → score."""

_NOTHING = 0.005
"""Loss that counts as none: half a point of a hundred."""


PRINTED: Mapping[Cell, float] = {
    **{Cell(*which): score for which, score in figures.PRUNED.items()},
    **{Cell(*which, "labels"): score for which, score in figures.RETRAINED.items()},
    **{Cell(*which, "distilled"): score for which, score in figures.DISTILLED.items()},
    **{Cell(*which): score for which, score in figures.QUANTISED.items()},
}
"""The paper's score of each cell that it prints, in percent."""


@dataclass(frozen=True)
class Ordering:
    """A direction that is asked for: one cell scores at least what another does."""

    asked: str
    better: Callable[[str, str], Cell]
    """The cell of a method and a structure that may be ahead."""
    worse: Callable[[str, str], Cell]
    methods: Sequence[str] = METHODS
    loses_nothing: bool = False
    """Whether it is asked that at most half a point of a hundred is lost."""


ORDERINGS = (
    Ordering(
        "SparseGPT > Wanda, pruned",
        lambda _, structure: Cell("sparsegpt", structure),
        lambda _, structure: Cell("wanda", structure),
        ("",),
    ),
    Ordering(
        "Wanda > magnitude, pruned? (the paper: comparable)",
        lambda _, structure: Cell("wanda", structure),
        lambda _, structure: Cell("magnitude", structure),
        ("",),
    ),
    Ordering(
        "re-trained > pruned",
        lambda method, structure: Cell(method, structure, "labels"),
        Cell,
    ),
    *(
        Ordering(
            f"labels and distillation > labels, {told}",
            lambda method, structure: Cell(method, structure, "distilled"),
            lambda method, structure: Cell(method, structure, "labels"),
            methods,
        )
        for told, methods in (("SparseGPT", ("sparsegpt",)), ("all methods", METHODS))
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
"""What appendix A's Tables 6 to 8 are about. Of magnitude and Wanda it says that they are
comparable, and its distilled models are of SparseGPT alone: what is asked beyond that it does not
claim.
"""


def score_table(scores: Scores) -> Table:
    """Methods and recoveries in rows, structures in columns: mean over seeds, ± their standard
    deviation, and the paper's figure in brackets.
    """
    rows: list[list[object]] = [["none", _cell(scores, BASE), "", ""]]
    for method in METHODS:
        labels = {"": "pruned", "labels": "re-trained", "distilled": "re-trained, distilled"}
        for recovery, label in labels.items():
            cells = [_cell(scores, Cell(method, one, recovery)) for one in STRUCTURES]
            rows.append([f"{method}, {label}", *cells])
    for kind, name in (("gptq", "INT8 by GPTQ"), ("fp8", "FP8 (E4M3)")):
        cells = [_cell(scores, Cell(kind, one)) for one in STRUCTURES]
        rows.append([f"sparsegpt, distilled, {name}", *cells])
    return Table(["model", *STRUCTURES], rows, title="NV-Embed's Tables 6 to 8", align="lr")


def _cell(scores: Scores, cell: Cell) -> str:
    values = [seed[cell] for seed in scores.values() if cell in seed]
    if not values:
        return ""
    told = f"{statistics.mean(values):.4f}"
    if len(values) > 1:
        told += f" ± {statistics.stdev(values):.4f}"
    return f"{told} ({PRINTED[cell]:g})" if cell in PRINTED else told


def ordering_table(scores: Scores) -> Table:
    """Each direction with the paper's difference in points of a hundred, and ours by seed, with its
    95 % interval and verdict.
    """
    rows = []
    for ordering in ORDERINGS:
        found = (_apart(ordering, seed) for seed in scores.values())
        differences = [statistics.mean(apart) for apart in found if apart]
        of_paper = _apart(ordering, PRINTED)
        whole = len(of_paper) == len(ordering.methods) * len(STRUCTURES)
        printed = f"{statistics.mean(of_paper):+.2f}" if whole else ""
        rows.append([ordering.asked, printed, *_judged(differences, ordering.loses_nothing)])
    heads = ["direction", "paper, points", "difference by seed", "verdict"]
    return Table(heads, rows, title="Directions", align="lrrl", look="open")


def _apart(ordering: Ordering, scores: Mapping[Cell, float]) -> list[float]:
    """Differences of methods and structures, of those that have both scores."""
    pairs = [
        (ordering.better(method, structure), ordering.worse(method, structure))
        for method in ordering.methods
        for structure in STRUCTURES
    ]
    return [scores[one] - scores[other] for one, other in pairs if {one, other} <= scores.keys()]


def _judged(differences: Sequence[float], loses_nothing: bool) -> tuple[str, str]:
    """Difference with its interval and seeds above 0, and whether the direction holds."""
    if not differences:
        return "", "not measured"
    found = difference(differences)
    return found.text(), found.verdict(-_NOTHING if loses_nothing else 0.0)
