"""General tasks of a guarded run, chosen by language and kind of its own data."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rayembed.config.named_benchmarks import benchmark_of
from rayembed.config.own_sets import OwnSet, RetrievalSet
from rayembed.config.run import Run
from rayembed.config.run_evaluation import GuardConfig, own_sets_of
from rayembed.evaluation.own_set import first_texts
from rayembed.pipeline.run.held_out import HeldOutSet, with_sets

logger = logging.getLogger(__name__)

ENGLISH = "eng-Latn"

_READ = 1000
"""Texts of each own set whose language is looked at."""
_LEAST_SHARE = 0.1
"""Share of all words that frequent words of their language have at least; a third in running
text."""
_AHEAD = 1.25
"""How many times as frequent the words of a language are at least as those of the next one."""

_WORDS: Mapping[str, str] = {
    ENGLISH: "the of and to in is that for it with as was on are by this be from at or a an which "
    "how what i my do can not if you all when",
    "fra-Latn": "le la les l de des du d un une et est en dans que qui pour au aux pas avec "
    "par il elle je mon ma sont ce cette comment où plus son sa ses",
    "spa-Latn": "el la los las de del un una y es en que para al con por se su sus no como cómo "
    "qué mi más pero este esta fue",
    "deu-Latn": "der die das den dem des und eine in zu von mit für auf nicht im wie was ich "
    "auch wird bei sich kann",
    "ita-Latn": "il lo la gli le di del della dei un una e è che per con non sono in da come nel "
    "al alla si mi",
    "por-Latn": "o os a as de do da dos das um uma e é em no na que para com não por se mais ao "
    "como meu são foi",
    "nld-Latn": "de het een en van is in dat op te voor met niet zijn aan er ook bij hoe ik mijn "
    "wat",
}
"""Language → its most frequent words."""


def with_fitting_tasks(run: Run, held_out: Sequence[HeldOutSet]) -> Run:
    """Restrict the guard's general tasks to sampled tasks of the kind and in the language of the
    run's own data, and log them; the run is unchanged if none fit.

    Sets that name a language stay as they are, as do sets of the user's own and mteb's tasks.
    """
    guard, evaluation = run.evaluation.guard, run.evaluation
    if guard is None:
        return run
    names = own_sets_of(guard, evaluation)
    own = _own(run, held_out)
    of_sample = [
        one
        for one in evaluation.own_sets
        if one.name not in names
        and (found := benchmark_of(one.path)) is not None
        and found.in_language(one, "") is None
    ]
    if not of_sample:
        if not (evaluation.benchmarks or evaluation.tasks or len(evaluation.own_sets) > len(names)):
            logger.info("evaluation.guard has no general tasks: own data alone decide")
        return run
    language = language_of(text for one in own for text in first_texts(one, _READ))
    symmetric = not any(isinstance(one, RetrievalSet) for one in own)
    kept = [one for one in of_sample if isinstance(one, RetrievalSet) != symmetric] or of_sample
    places = {one.name: _in_language(one, language) for one in kept}
    if next(iter(places.values())).language == language:
        why = f"in the language of the own data ({language})"
    elif language:
        why = f"in English, as the sample has none in {language}"
    else:
        why = "in English, as the language of the own data is not clear"
    logger.info("general tasks of evaluation.guard, %s: %s", why, ", ".join(places))
    dropped = {one.name for one in of_sample} - places.keys()
    sets = tuple(places.get(o.name, o) for o in evaluation.own_sets if o.name not in dropped)
    scored = evaluation.model_copy(update={"own_sets": sets})
    return run.model_copy(update={"evaluation": scored})


def other_language(run: Run, held_out: Sequence[HeldOutSet]) -> str:
    """Note for a verdict whose general tasks are not in the language of the own data, or where that
    language is unclear; else empty.

    Args:
        run: that `with_fitting_tasks` gave.
    """
    if run.evaluation.guard is None:
        return ""
    own = _own(run, held_out)
    names = {one.name for one in own}
    sets = [one for one in run.evaluation.own_sets if one.name not in names]
    found = sorted({one.language for one in sets if benchmark_of(one.path) is not None})
    language = language_of(text for one in own for text in first_texts(one, _READ))
    if not found or found == [language]:
        return ""
    told = f"own data in {language}" if language else "the language of the own data is not clear"
    return f"general tasks in {', '.join(found)}, {told}"


def _own(run: Run, held_out: Sequence[HeldOutSet]) -> list[OwnSet]:
    """Sets on the user's own data, held-out parts among them."""
    evaluation = run.evaluation
    names = own_sets_of(evaluation.guard or GuardConfig(), evaluation)
    own = [one for one in evaluation.own_sets if one.name in names]
    return own + list(with_sets(run, held_out).evaluation.own_sets[len(evaluation.own_sets) :])


def language_of(texts: Iterable[str]) -> str:
    """Detect the language of most texts by its frequent words, as mteb's code (`fra-Latn`); empty
    if unknown or mixed.
    """
    words = Counter(word for text in texts for word in re.findall(r"\w+", text.lower()))
    found = Counter(
        {name: sum(words[word] for word in listed.split()) for name, listed in _WORDS.items()}
    )
    (first, most), (_, next_most) = found.most_common(2)
    enough = most >= max(1, _LEAST_SHARE * words.total()) and most >= _AHEAD * next_most
    return first if enough else ""


def _in_language(own: OwnSet, language: str) -> OwnSet:
    benchmark = benchmark_of(own.path)
    assert benchmark is not None
    return benchmark.in_language(own, language) or own
