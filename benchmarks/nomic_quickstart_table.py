"""Nomic's quickstart with dense layers and with experts: the same pairs, steps and seeds.

The same encoder, three seeds each; a seed also draws the pairs and the held-out articles, so that
gains are taken seed by seed. Rows: the encoder before training, both after it, and both with
vectors cut to 256 dimensions, at which they are trained, too; and the model that the encoder is
taken from as it is, with its own positions, which training begins without. Cross-lingual retrieval
is the mean of French and Spanish articles that look for their English counterparts. What is
finished is not run again; see `seeded_runs`.
Run: python benchmarks/nomic_quickstart_table.py [--seeds 0,1,2] [--only-table] [--set path=value …]
"""

import sys

from rayembed.recipes.nomic import MATRYOSHKA
from rayembed.recipes.sample import CROSS_LINGUAL, MINILM
from rayembed_papers.spread import MEAN, shown
from seeded_runs import TRAINED, UNTRAINED, Comparison, main

DENSE, EXPERTS = "dense", "8 experts, 2 for a token"
AS_IT_IS = "all-MiniLM as it is"
CUT = f", {MATRYOSHKA} dimensions"
LINES = (
    (EXPERTS, DENSE, MEAN, "Experts, mean of all tasks"),
    (EXPERTS, DENSE, CROSS_LINGUAL, "Experts, across languages"),
    (EXPERTS, UNTRAINED, CROSS_LINGUAL, "Training, across languages"),
    (EXPERTS, AS_IT_IS, CROSS_LINGUAL, "Trained against all-MiniLM, across languages"),
    (EXPERTS + CUT, EXPERTS, MEAN, f"Cut to {MATRYOSHKA} dimensions, mean of all tasks"),
)
"""What is compared with what, by which column."""


def verdicts(table):
    """A line for each comparison: the difference seed by seed."""
    lines = []
    for row, than, column, about in LINES:
        gains = [
            a - b
            for a, b in zip(table.scores(row, column), table.scores(than, column), strict=True)
        ]
        signs = {gain > 0 for gain in gains}
        told = "one direction with every seed" if len(signs) == 1 else "undecided between seeds"
        lines.append(f"{about}: {shown(gains, signed=True)} ({row!r} less {than!r}), {told}.")
    return lines


COMPARISON = Comparison(
    name="nomic-quickstart-table",
    job="train_nomic.py",
    recipes={DENSE: "nomic-quickstart-dense", EXPERTS: "nomic-quickstart"},
    rows={
        AS_IT_IS: (DENSE, "all-minilm-l6-v2"),
        UNTRAINED: (DENSE, UNTRAINED),
        **{label: (label, TRAINED) for label in (DENSE, EXPERTS)},
        **{
            label + CUT: (label, f"the same, {MATRYOSHKA} dimensions") for label in (DENSE, EXPERTS)
        },
    },
    base=DENSE,
    baselines=(MINILM,),
    corner="model",
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(COMPARISON, __doc__))
