"""Choose the guard's general tasks by the language and kind of the user's own data."""

import logging
from collections.abc import Sequence

from rayembed.config.named_benchmarks import benchmark_of, sets_to_choose
from rayembed.config.own_sets import OwnSet, RetrievalSet
from rayembed.config.run import Run
from rayembed.config.run_evaluation import GuardConfig, own_sets_of
from rayembed.evaluation.own_set import first_texts
from rayembed.pipeline.run.held_out import HeldOutSet, with_sets

logger = logging.getLogger(__name__)

_READ = 1000
"""Texts of each own set whose language is looked at."""


def with_fitting_tasks(run: Run, held_out: Sequence[HeldOutSet]) -> Run:
    """Restrict the guard's general tasks to sampled ones of the same kind and language as the own
    data; keep all if none match.

    Sets that name a language stay as they are, as do sets of the user's own and mteb's tasks.
    """
    guard, evaluation = run.evaluation.guard, run.evaluation
    if guard is None:
        return run
    names = own_sets_of(guard, evaluation)
    own = _own(run, held_out)
    of_sample = sets_to_choose(run)
    if not of_sample:
        if not (evaluation.benchmarks or evaluation.tasks or len(evaluation.own_sets) > len(names)):
            logger.info(
                "evaluation.guard has no general tasks, so it judges models by your own data alone"
            )
        return run
    language = _language(of_sample[0], own)
    symmetric = not any(isinstance(one, RetrievalSet) for one in own)
    kept = [one for one in of_sample if isinstance(one, RetrievalSet) != symmetric] or of_sample
    places = {one.name: _in_language(one, language) for one in kept}
    if next(iter(places.values())).language == language:
        why = f"in the language of the own data ({language})"
    elif language:
        why = f"in English, as the sample has none in {language}"
    else:
        why = "in English, as the language of the own data is not clear"
    logger.info("the guard scores these general tasks, %s: %s", why, ", ".join(places))
    dropped = {one.name for one in of_sample} - places.keys()
    sets = tuple(places.get(o.name, o) for o in evaluation.own_sets if o.name not in dropped)
    scored = evaluation.model_copy(update={"own_sets": sets})
    return run.model_copy(update={"evaluation": scored})


def other_language(run: Run, held_out: Sequence[HeldOutSet]) -> str:
    """Write a note if the general tasks' language differs from the own data's, or if the own data's
    language is unclear; else empty.

    Args:
        run: that `with_fitting_tasks` gave.
    """
    if run.evaluation.guard is None:
        return ""
    own = _own(run, held_out)
    names = {one.name for one in own}
    sets = [one for one in run.evaluation.own_sets if one.name not in names]
    of_sample = [one for one in sets if benchmark_of(one.path) is not None]
    found = sorted({one.language for one in of_sample})
    language = _language(of_sample[0], own) if of_sample else ""
    if not found or found == [language]:
        return ""
    told = f"own data in {language}" if language else "the language of the own data is not clear"
    return f"general tasks in {', '.join(found)}, {told}"


def _own(run: Run, held_out: Sequence[HeldOutSet]) -> list[OwnSet]:
    """List the evaluation sets on the user's own data, including held-out parts."""
    evaluation = run.evaluation
    names = own_sets_of(evaluation.guard or GuardConfig(), evaluation)
    own = [one for one in evaluation.own_sets if one.name in names]
    return own + list(with_sets(run, held_out).evaluation.own_sets[len(evaluation.own_sets) :])


def _language(of_sample: OwnSet, own: Sequence[OwnSet]) -> str:
    """Detect the language of the own data; empty if it is unclear."""
    benchmark = benchmark_of(of_sample.path)
    assert benchmark is not None
    return benchmark.language_of(text for one in own for text in first_texts(one, _READ))


def _in_language(own: OwnSet, language: str) -> OwnSet:
    benchmark = benchmark_of(own.path)
    assert benchmark is not None
    return benchmark.in_language(own, language) or own
