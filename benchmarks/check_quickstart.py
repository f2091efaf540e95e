"""Whether a quickstart learnt what it should: its scores against those of the untrained model.

The retrievals that it trains must gain at least 0.20 nDCG@10, the other tasks of stage 2 may not
lose. Ends with 1 and names what does not hold; what is not trained is only told.
Run: python benchmarks/check_quickstart.py [RUN_FOLDER]
"""

import argparse
import csv
import sys
from pathlib import Path

UNTRAINED = "untrained"
TRAINED = ("WikiSentenceRetrieval", "WikiDescriptionRetrieval")
TRAINED_TOO = ("WikiTopicClassification", "WikiTopicClustering")
GAIN = 0.20


def read_scores(path):
    """Model label → task → score, of a `scores.csv`; missing scores are left out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [dict(row) for row in csv.DictReader(file)]
    return {row.pop("model"): {k: float(v) for k, v in row.items() if v} for row in rows}


def failures(scores):
    """What does not hold, a line each; empty when all does."""
    stages = [label for label in scores if label.startswith("stage ")]
    if UNTRAINED not in scores or not stages:
        return [f"needs rows {UNTRAINED!r} and 'stage …', there are {', '.join(scores)}"]
    base, last = scores[UNTRAINED], scores[stages[-1]]
    found = [
        f"{task}: no score of {label!r}"
        for task in (*TRAINED, *TRAINED_TOO)
        for label in (UNTRAINED, stages[-1])
        if task not in scores[label]
    ]
    for task in ({*TRAINED, *TRAINED_TOO} & base.keys()) & last.keys():
        wanted = GAIN if task in TRAINED else 0.0
        gain = last[task] - base[task]
        if not gain >= wanted:  # also false for a score that is no number
            found.append(f"{task}: {base[task]:.3f} → {last[task]:.3f}, must gain {wanted:.2f}")
    return sorted(found)


def print_untrained(scores):
    """Tell how the tasks changed that no stage trains."""
    base = scores[UNTRAINED]
    last = scores[[label for label in scores if label.startswith("stage ")][-1]]
    for task in sorted(base.keys() & last.keys() - {*TRAINED, *TRAINED_TOO}):
        print(f"not trained: {task} {base[task]:.3f} → {last[task]:.3f}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_folder", nargs="?", default="outputs/runs/nvembed-quickstart")
    path = Path(parser.parse_args(arguments).run_folder) / "scores.csv"
    if not path.exists():
        print(f"{path} is not there: run `make quickstart` first", file=sys.stderr)
        return 1
    scores = read_scores(path)
    found = failures(scores)
    for line in found:
        print(line, file=sys.stderr)
    if not found:
        print(f"What is trained holds: {path}")
        print_untrained(scores)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
