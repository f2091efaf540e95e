"""Tabulate the measured scores next to the paper's, and judge whether the paper's claims hold."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayembed.display.tables import Table
from rayembed_extras.sweeps.seeds import difference
from rayembed_papers.compression.measure import BASE, METHODS, STRUCTURES, MeasuredCell

Scores = Mapping[int, Mapping[MeasuredCell, float]]
"""Seed → cell → score."""

Model = tuple[str, str]
"""Method and recovery of a cell."""

_NOTHING = 0.005
"""Largest loss that counts as no loss: half a percentage point."""

_TABLES: Mapping[Model, Sequence[float]] = {
    # Table 6, rows `Pruning`.
    ("magnitude", ""): (64.62, 67.6, 69.18),
    ("wanda", ""): (64.26, 67.87, 70.19),
    ("sparsegpt", ""): (68.48, 70.11, 71.33),
    # Table 6, rows `Re-train`, by labels.
    ("magnitude", "labels"): (69.96, 70.46, 70.84),
    ("wanda", "labels"): (69.74, 70.42, 70.81),
    ("sparsegpt", "labels"): (70.41, 70.9, 71.18),
    # Table 7, row `GT+KD`.
    ("sparsegpt", "distilled"): (71.17, 71.22, 71.48),
    # Table 8: INT8 by GPTQ and FP8 E4M3 of the pruned and distilled model.
    ("gptq", ""): (71.17, 71.23, 71.49),
    ("fp8", ""): (70.94, 71.28, 71.55),
}
"""NV-Embed's means over MTEB (arXiv 2405.17428, appendix A), in percent, by structure."""

PRINTED: Mapping[MeasuredCell, float] = {
    MeasuredCell(method, structure, recovery): score
    for (method, recovery), scores in _TABLES.items()
    for structure, score in zip(STRUCTURES, scores, strict=True)
}
"""The paper's score of each cell that it prints, in percent."""


@dataclass(frozen=True)
class Ordering:
    """A claim of the paper to check: one model scores at least as high as another."""

    asked: str
    pairs: Sequence[tuple[Model, Model]]
    """Pairs of a model claimed to be better and the model that it is compared with."""
    loses_nothing: bool = False
    """Whether the claim is a loss of at most half a percentage point."""


def _by_method(better: str, worse: str) -> list[tuple[Model, Model]]:
    return [((method, better), (method, worse)) for method in METHODS]


_PRUNED, _DISTILLED = ("sparsegpt", ""), ("sparsegpt", "distilled")

ORDERINGS = (
    Ordering("SparseGPT > Wanda, pruned", [(_PRUNED, ("wanda", ""))]),
    Ordering(
        "Wanda > magnitude, pruned? (the paper: comparable)", [(("wanda", ""), ("magnitude", ""))]
    ),
    Ordering("re-trained > pruned", _by_method("labels", "")),
    Ordering(
        "labels and distillation > labels, SparseGPT", [(_DISTILLED, ("sparsegpt", "labels"))]
    ),
    Ordering("labels and distillation > labels, all methods", _by_method("distilled", "labels")),
    Ordering("INT8 loses nothing", [(("gptq", ""), _DISTILLED)], loses_nothing=True),
    Ordering("FP8 loses nothing", [(("fp8", ""), _DISTILLED)], loses_nothing=True),
)
"""Claims of appendix A's Tables 6 to 8. Of magnitude and Wanda it says that they are comparable,
and its distilled models are of SparseGPT alone: what is asked beyond that it does not claim."""


def score_table(scores: Scores) -> Table:
    """Tabulate methods by structure of zeros: mean ± standard deviation over seeds, with the
    paper's figure in brackets.
    """
    rows: list[list[object]] = [["none", _cell(scores, BASE), "", ""]]
    for method in METHODS:
        labels = {"": "pruned", "labels": "re-trained", "distilled": "re-trained, distilled"}
        for recovery, label in labels.items():
            cells = [_cell(scores, MeasuredCell(method, one, recovery)) for one in STRUCTURES]
            rows.append([f"{method}, {label}", *cells])
    for kind, name in (("gptq", "INT8 by GPTQ"), ("fp8", "FP8 (E4M3)")):
        cells = [_cell(scores, MeasuredCell(kind, one)) for one in STRUCTURES]
        rows.append([f"sparsegpt, distilled, {name}", *cells])
    return Table(["model", *STRUCTURES], rows, title="NV-Embed's Tables 6 to 8", align="lr")


def _cell(scores: Scores, cell: MeasuredCell) -> str:
    values = [seed[cell] for seed in scores.values() if cell in seed]
    if not values:
        return ""
    cell_text = f"{statistics.mean(values):.4f}"
    if len(values) > 1:
        cell_text += f" ± {statistics.stdev(values):.4f}"
    return f"{cell_text} ({PRINTED[cell]:g})" if cell in PRINTED else cell_text


def ordering_table(scores: Scores) -> Table:
    """Tabulate each claim: the paper's difference in percentage points, the measured one with its
    95 % interval, and a verdict.
    """
    rows = []
    for ordering in ORDERINGS:
        found = (_apart(ordering, seed) for seed in scores.values())
        differences = [statistics.mean(apart) for apart in found if apart]
        of_paper = _apart(ordering, PRINTED)
        whole = len(of_paper) == len(ordering.pairs) * len(STRUCTURES)
        printed = f"{statistics.mean(of_paper):+.2f}" if whole else ""
        rows.append([ordering.asked, printed, *_judged(differences, ordering.loses_nothing)])
    heads = ["direction", "paper, points", "difference by seed", "verdict"]
    return Table(heads, rows, title="Directions", align="lrrl", look="open")


def _apart(ordering: Ordering, scores: Mapping[MeasuredCell, float]) -> list[float]:
    """Differences between the models of a claim, for each structure for which both were scored."""
    pairs = [
        [MeasuredCell(method, structure, recovery) for method, recovery in pair]
        for pair in ordering.pairs
        for structure in STRUCTURES
    ]
    return [scores[one] - scores[other] for one, other in pairs if {one, other} <= scores.keys()]


def _judged(differences: Sequence[float], loses_nothing: bool) -> tuple[str, str]:
    """Return the difference with its interval, the number of seeds above 0, and whether the claim
    holds.
    """
    if not differences:
        return "", "not measured"
    found = difference(differences)
    return found.text(), found.verdict(-_NOTHING if loses_nothing else 0.0)
