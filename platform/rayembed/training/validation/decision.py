"""Choose by validation scores which step's weights a stage passes on and when it stops early; pure
functions.

Scores count in the order of their steps, never in that in which they arrive. Nothing is decided
from a score while one of an earlier step is still to come, so how fast scores are taken, how many
at a time, and whether the run was interrupted change no decision.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from rayembed.config.run_evaluation import EarlyStoppingConfig

Scores = Mapping[int, float | None]
"""Step → score, or None where it could not be taken; a step still without one is not there."""


@dataclass(frozen=True)
class Choice:
    """Best validated step so far, and whether the stage ends early."""

    step: int | None
    """Step with the best score; None: no step has a score yet."""
    ends_at: int | None
    """Step at which early stopping ends the stage; scores of later steps are ignored."""
    settled: bool
    """Whether further scores cannot change the choice: all exist, or the stage has ended early."""


def validated_steps(num_steps: int, every: int) -> tuple[int, ...]:
    """Return the steps of a stage that are validated: every `every` steps, and the last step."""
    return tuple(sorted({*range(every, num_steps + 1, every), num_steps}))


def choose(
    scores: Scores, steps: Collection[int], stopping: EarlyStoppingConfig | None = None
) -> Choice:
    """Choose the best step and whether to stop early, from the scores up to the first step without
    a score.

    The best step has the highest score, of equal ones the first. With early stopping the stage
    ends at the step whose score is the `patience`-th in a row that does not exceed the last
    improvement by more than `min_delta`; the best is then that of the steps up to it.

    Args:
        steps: those that are to have a score, as `validated_steps` gives them.
    """
    best: int | None = None
    highest = improvement = float("-inf")
    in_a_row = 0
    for step in sorted(steps):
        if step not in scores:
            return Choice(best, None, settled=False)
        score = scores[step]
        if score is None:
            continue
        if score > highest:
            best, highest = step, score
        if stopping is None:
            continue
        if score > improvement + stopping.min_delta:
            improvement, in_a_row = score, 0
            continue
        in_a_row += 1
        if in_a_row == stopping.patience:
            return Choice(best, step, settled=True)
    return Choice(best, None, settled=True)


def promoted_step(choice: Choice, steps: Collection[int], keep: Literal["best", "last"]) -> int:
    """Return the step whose weights the stage passes on: the best or the last, as the setting
    `keep` says.

    Where no step has a score these are the last ones.
    """
    return max(steps) if keep == "last" or choice.step is None else choice.step


def still_needed(
    there: Collection[int],
    scores: Scores,
    steps: Collection[int],
    stopping: EarlyStoppingConfig | None,
    keep: Literal["best", "last"],
) -> set[int]:
    """Return the steps in `there` whose weights may still be scored or passed on to the
    next stage.
    """
    choice = choose(scores, steps, stopping)
    if choice.ends_at is not None:
        return {step for step in there if step == choice.step}
    first_open = min((step for step in steps if step not in scores), default=max(steps) + 1)
    needed = {step for step in there if step > first_open or step not in scores}
    needed |= {step for step in there if keep == "best" and step == choice.step}
    if there and (keep == "last" or choice.step is None):
        needed.add(max(there))
    return needed
