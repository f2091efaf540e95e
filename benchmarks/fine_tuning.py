"""Quality of ways to fine-tune, beside InfoNCE with mined negatives, on four small sets.

Student, sets and held-out parts are those of `backbone.py`. All arms of a set and seed have the
same rows, batches and number of steps. Teachers are the whole all-MiniLM-L6-v2, which knows little
French and Spanish, and a cross-encoder that is trained here on English pairs of the sample. The
scores are nDCG@10 on the held-out part; differences to InfoNCE are by seed, with their 95 %
interval.

    python benchmarks/fine_tuning.py --seeds 0 1 2

The arm `guard` scores mixtures of the trained student with its start too, on the held-out part and
on the sample's other tasks. The student is cut out of MiniLM and begins low; `guard, whole` trains
all six layers, which have something to lose. Results are lines of a file; what is in it is not run
again.
"""

import statistics
import tempfile
from functools import partial

from backbone import (
    JUDGE_LENGTH,
    apart,
    cross_encoder,
    measured,
    mining,
    own_score,
    parsed,
    table,
    trained,
)

KL = {"kind": "listwise_kl", "infonce_temperature": 0.05}


def rescored(reranker):
    """Mining whose candidates the cross-encoder scores."""
    rescoring = {"model": reranker, "max_length": JUDGE_LENGTH}
    return {"data.datasets.pairs.mining": mining(rescoring=rescoring, candidates=20)}


def guarded():
    """The sample's tasks beside the held-out part, and mixtures with the start."""
    from rayembed.recipes.sample import Wikipedia

    sets = Wikipedia().scores(documents=500, queries=500, max_length=48)
    return {
        "evaluation.own_sets": [one.model_dump(mode="json") for one in sets],
        "evaluation.guard": {},
    }


def taught(**loss):
    """A loss beside the vectors of the teacher, which are stored before the stage."""
    from rayembed.recipes.sample import MINILM

    teacher = {"teacher": MINILM, "max_length": 64}
    return {
        "loss": {"kind": "infonce", **loss},
        "stages.finetune.teachers": [teacher],
    }


ARMS = {
    "infonce": lambda _: {},
    "kl alone": lambda _: {"loss": {**KL, "infonce_weight": 0}},
    "infonce + kl": lambda _: {"loss": KL},
    "infonce + margin mse": lambda _: {"loss": {**KL, "kind": "margin_mse"}},
    "infonce + vectors": lambda _: taught(kind="vector_distillation", infonce_temperature=0.05),
    "infonce + relations": lambda _: taught(
        kind="similarity_distillation", infonce_temperature=0.05
    ),
    "infonce + masks": lambda _: taught(
        temperature=0.05, false_negatives={"by": "teachers", "margin": 0.0}
    ),
    "rescored": rescored,
    "rescored + kl": lambda reranker: {"loss": KL, **rescored(reranker)},
    "guard": lambda _: guarded(),
    "guard, whole": lambda _: {**guarded(), "model.backbone.num_layers": None},
}
"""Arm → arguments of `trained`, made of the reference of the cross-encoder."""


def mixtures(of_arm):
    """Models of the arm `guard` with their scores on own data and in general, as Markdown.

    Args:
        of_arm: set → scores by seed.
    """
    lines = ["| set | model | own | general |", "| --- | --- | ---: | ---: |"]
    for name, seeds in of_arm.items():
        for model in seeds[0]:
            own = [own_score(scores, model) for scores in seeds]
            general = [_general(scores[model]) for scores in seeds]
            start = [own_score(scores, "start") for scores in seeds]
            of_start = [_general(scores["start"]) for scores in seeds]
            cells = [f"{statistics.mean(own):.4f}", f"{statistics.mean(general):.4f}"]
            if model != "start":
                cells = [
                    f"{cell}, {apart(*pair)}"
                    for cell, pair in zip(cells, ((own, start), (general, of_start)), strict=True)
                ]
            lines.append("| " + " | ".join([name, model, *cells]) + " |")
    return "\n".join(lines)


def _general(scores):
    return statistics.mean(score for task, score in scores.items() if task != "pairs-held-out")


def main():
    given = parsed(__doc__, ARMS)
    reranker = ""
    if any(arm.startswith("rescored") for arm in given.arms):
        reranker = cross_encoder()
    found, of_guard = {}, {}
    for name in given.sets:
        with tempfile.TemporaryDirectory() as output:
            for seed in given.seeds:
                for arm in given.arms:
                    run = partial(trained, name, seed, output, **ARMS[arm](reranker))
                    scores = measured(given.results, name, arm, seed, run)
                    if arm.startswith("guard"):
                        label = name + arm.removeprefix("guard")
                        of_guard.setdefault(label, []).append(scores)
                    else:
                        found.setdefault(name, {}).setdefault(arm, []).append(own_score(scores))
    if found:
        print(f"\n{table(found)}")
    if of_guard:
        print(f"\n{mixtures(of_guard)}")


if __name__ == "__main__":
    main()
