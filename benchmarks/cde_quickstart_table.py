"""CDE's Table 1 at the quickstart's size: each part of the method added to the one before.

Random batches, clustered ones, clustered and filtered, and the same with context: the same encoder,
pairs, batch size and steps, three seeds each. A seed also draws the pairs and the held-out
articles, so that gains are taken seed by seed. The last model is also scored behind the null token,
which tells what of its gain is the context's. What is finished is not run again; see
`seeded_runs`. The paper's directions (arXiv 2410.02525, Table 1 and Figure 4) hold or fail by the
mean nDCG@10 of the two retrieval tasks.
Run: python benchmarks/cde_quickstart_table.py [--seeds 0,1,2] [--only-table] [--set path=value …]
"""

import sys
from statistics import fmean

from rayembed.evaluation.tables import ScoreKey
from rayembed.recipes.sample import RETRIEVAL_TASKS
from rayembed_papers.spread import shown
from seeded_runs import TRAINED, UNTRAINED, Comparison, main

RANDOM, CLUSTERED, FILTERED, CONTEXT = (
    "random batches",
    "clustered",
    "clustered, filtered",
    "clustered, filtered, context",
)
WITHOUT = f"{CONTEXT}; scored without"
PAPER = (
    (FILTERED, RANDOM, "Table 1: 61.7 after 59.9"),
    (FILTERED, CLUSTERED, "Figure 4: filtering improves"),
    (CONTEXT, FILTERED, "Table 1: 63.1 after 61.7"),
    (CONTEXT, WITHOUT, "Figure 16: a full context is best"),
)
"""What the paper finds better than what, and where. The third compares architectures: a second
encoder and its MLPs come with the context. The fourth is the same model with and without."""


def verdicts(table):
    """A line for each direction of the paper: whether it came out so, by the retrieval tasks."""
    lines = []
    for better, than, where in PAPER:
        gains = [
            fmean(
                table.rows[better][task][i] - table.rows[than][task][i] for task in RETRIEVAL_TASKS
            )
            for i in range(len(table.rows[better][RETRIEVAL_TASKS[0]]))
        ]
        if all(gain > 0 for gain in gains):
            said = "as in the paper with every seed"
        elif all(gain < 0 for gain in gains):
            said = "against the paper with every seed"
        else:
            said = "undecided: not one direction with every seed"
        measured = shown(gains, signed=True)
        lines.append(f"{better!r} less {than!r}: {measured}, {said} ({where}).")
    return lines


COMPARISON = Comparison(
    name="cde-quickstart-table",
    job="train_cde.py",
    recipes={
        RANDOM: "cde-quickstart-random",
        CLUSTERED: "cde-quickstart-clustered",
        FILTERED: "cde-quickstart-filtered",
        CONTEXT: "cde-quickstart",
    },
    rows={
        "untrained": (RANDOM, UNTRAINED),
        "untrained, with context": (CONTEXT, UNTRAINED),
        **{label: (label, TRAINED) for label in (RANDOM, CLUSTERED, FILTERED, CONTEXT)},
        WITHOUT: (CONTEXT, ScoreKey(without_context=True).label(())),
    },
    base=RANDOM,
    corner="batches",
    verdicts=verdicts,
)

if __name__ == "__main__":
    sys.exit(main(COMPARISON, __doc__))
