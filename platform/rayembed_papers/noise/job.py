"""Run the noise job, from its arguments to a table of how much unrelated text lowers scores."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from rayembed.assets.storage import join, write_atomic
from rayembed.config.run import Run
from rayembed.config.types import expanded_name
from rayembed.display.tables import Table, console, show
from rayembed.errors import ConfigError
from rayembed.evaluation.tables import heading
from rayembed.pipeline.job import Job, JobContext, Reader, at_least, option
from rayembed.pipeline.run.training_job import base_run
from rayembed.pipeline.storage import placed
from rayembed.recipes.catalogue import recipe_names

if TYPE_CHECKING:
    from rayembed_papers.noise.scores import NoiseScores

RECIPE = "causal2vec-quickstart"

QUICKSTARTS = {
    "last token": "causal2vec-quickstart-last-token",
    "Causal2Vec": "causal2vec-quickstart",
}
"""Labels and names of the runs that are compared if no model is given."""


def measure(run: Run, models: Mapping[str, str], *, num_words: int) -> dict[str, "NoiseScores"]:
    """Score each model, by its label, on the tasks' texts with and without noise appended.

    Args:
        run: its own sets are the tasks.
        models: label → asset reference of a saved model.

    Raises:
        RayembedError: a model, the tasks or the cluster cannot be had.
    """
    from rayembed.pipeline.run.on_ray import connect
    from rayembed_papers.measure_on_ray import measured_on_ray
    from rayembed_papers.noise.scores import noise_scores

    connect()
    placement = placed(run).placement
    return {
        label: measured_on_ray(
            noise_scores,
            reference,
            run,
            name=label.replace(" ", "-"),
            results_folder=join(placement.storage_path, "noise"),
            num_words=num_words,
            placement=placement,
        )
        for label, reference in models.items()
    }


def noise_table(scores: Mapping[str, "NoiseScores"]) -> Table:
    """Tabulate `clean → noisy (difference)` for each model, a row for each task and their mean
    last.
    """
    tasks = list(next(iter(scores.values())).clean)
    some = {", ".join(filter(None, heading(task))): [task] for task in tasks} | {"mean": tasks}
    rows = [[label, *(_cell(found, of) for found in scores.values())] for label, of in some.items()]
    title = "Unrelated words behind every text"
    return Table(["task", *scores], rows, title=title, align="lr")


def _cell(found: "NoiseScores", tasks: Sequence[str]) -> str:
    clean, noisy = (fmean(scores[task] for task in tasks) for scores in (found.clean, found.noisy))
    return f"{clean:.3f} → {noisy:.3f} ({noisy - clean:+.3f})"


def _quickstarts(run: Run) -> dict[str, str]:
    storage = placed(run).placement.storage_path
    last = run.stages[-1].name
    return {
        label: join(storage, "runs", name, "models", last) for label, name in QUICKSTARTS.items()
    }


def _labelled(text: str) -> tuple[str, str]:
    label, equals, reference = text.partition("=")
    if not equals or not label or not reference:
        raise ConfigError(f"--model {text!r}: expected LABEL=REFERENCE, such as ours=outputs/model")
    return label, expanded_name(reference)


def _measure(run: Run, context: JobContext) -> None:
    words = context.args.words
    models = dict(map(_labelled, context.args.model)) or _quickstarts(run)
    scores = measure(run, models, num_words=words)
    table = noise_table(scores)
    console(context.out).print(table)
    place = join(placed(run).placement.storage_path, "noise", f"noise-{words}-words.md")
    write_atomic(place, show(table, "markdown").encode())
    context.out.write(f"Table {place}\n")


_READER = Reader(
    kind=Run,
    base=base_run,
    names=recipe_names,
    recipe="the run whose tasks are scored",
    default=RECIPE,
    examples="seed=1",
)

_MODEL = option(
    "--model LABEL=REFERENCE",
    f"a saved model; default: the runs {' and '.join(QUICKSTARTS.values())}",
    often=True,
)
_WORDS = option("--words N", "words of noise behind every text", type=at_least(1), default=16)

run_noise_job = Job(
    options=(_MODEL, _WORDS, *_READER.options),
    read=_READER,
    run=_measure,
    log=(__package__,),
)
"""The job that measures the score loss of models caused by unrelated text."""
