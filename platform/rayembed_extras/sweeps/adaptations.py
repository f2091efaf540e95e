"""What a sweep does with adaptations: check, prepare, train as trials, hand the best encoder on."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from rayembed.config.document import fingerprint
from rayembed.config.settings import nearest
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.on_ray import execute_with_ray_data
from rayembed.errors import ArtifactError, ConfigError
from rayembed.pipeline.run.train import TrialOf
from rayembed_extras.adaptation.adapt import (
    AdaptedEncoder,
    adapt,
    adapt_trial,
    check_encoder,
    held_out_scores,
)
from rayembed_extras.adaptation.make import find_corpus, prepare_sequences
from rayembed_extras.adaptation.plan import SequencePlan
from rayembed_extras.adaptation.settings import Adaptation
from rayembed_extras.sweeps.events import Event
from rayembed_extras.sweeps.settings import Sweep, deciding
from rayembed_extras.sweeps.space import apply
from rayembed_extras.sweeps.trial_store import TrialRecord
from rayembed_extras.sweeps.trials import Trial


def check_adaptations(runs: Sequence[Adaptation]) -> None:
    """Check the encoders and the texts of adaptations, each different ones once.

    Raises:
        RayembedError: as `check_encoder` and `find_corpus`.
    """
    for run in _different(runs, "model"):
        check_encoder(run)
    for run in _different(runs, "corpus"):
        find_corpus(run)


def _different(runs: Sequence[Adaptation], part: str) -> Iterable[Adaptation]:
    """One run for each different value of a group of settings."""
    return {fingerprint(run.model_dump(mode="json")[part]): run for run in runs}.values()


def prepare_adaptations(sweep: Sweep, runs: Sequence[Adaptation]) -> list[list[str]]:
    """Prepare the sequences of adaptations, each of which needs other ones; the folder of each
    one's plan.

    Raises:
        ConfigError: a language that the metric weights has nothing held out.
        RayembedError: as `prepare_sequences`.
    """
    found = []
    for run in runs:
        storage = run.placement.storage_path
        context = PipelineContext(storage, run.seed, execute_with_ray_data)
        folder = prepare_sequences(run, context)
        plan = SequencePlan.open(folder)
        found.append([folder])
        scored = [told["language"] for told in plan.languages_told if told["held_out"]]
        for code in sweep.metric.weights:
            if code not in scored:
                raise ConfigError(
                    f"metric.weights names the language {code!r}, of which nothing is held out "
                    f"with seed {run.seed}; {nearest(code, scored)}"
                )
    return found


def run_trial(
    sweep: Sweep, trial: Trial, tags: Mapping[str, str], tell: Callable[[Event], None]
) -> None:
    """Return when the trial's encoder is adapted; `tell` has got every score, the final one last.

    Raises:
        RayembedError: as `adapt`.
    """
    run = trial.run
    assert isinstance(run, Adaptation)

    def on_scores(_: str, scores: dict[str, float], step: int) -> None:
        tell(Event("score", step, deciding(sweep, scores), scores))

    adapted = adapt_trial(run, TrialOf(tags, on_scores))
    scores = held_out_scores(adapted.metrics)
    if not scores:
        raise ArtifactError(
            f"the log of {run.name!r} has no score of what is held out at step {run.total_steps}; "
            "the trial cannot be compared"
        )
    tell(Event("final", run.total_steps, deciding(sweep, scores), scores))


def hand_on_best(sweep: Sweep, found: TrialRecord) -> AdaptedEncoder:
    """The encoder of the best trial, which is adapted already.

    Raises:
        RayembedError: as `adapt`.
    """
    run = apply(sweep.runs[found.label], found.values)
    assert isinstance(run, Adaptation)
    return adapt(run.model_copy(update={"name": found.key}))
