"""The noise job: from its arguments to a table of what unrelated text takes from models' scores."""

import argparse
import sys
from collections.abc import Mapping, Sequence

from rayembed.assets.storage import join, write_atomic
from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.errors import ConfigError
from rayembed.evaluation.tables import heading
from rayembed.pipeline.command_line import base_run, exit_code, log_to_stderr
from rayembed.pipeline.storage import absolute_storage
from rayembed.tables import Table, console, show
from rayembed_papers.noise.scores import NoiseScores

RECIPE = "causal2vec-quickstart"

QUICKSTARTS = {
    "last token": "causal2vec-quickstart-last-token",
    "Causal2Vec": "causal2vec-quickstart",
}
"""Labels and names of the runs that are compared where no model is given."""


def run_noise_job(argv: Sequence[str], *, about: str | None) -> int:
    """The exit code: 0, 1 when it failed, 2 when it was asked wrongly.

    Args:
        argv: arguments without the script's name.
        about: what `--help` begins with.
    """

    def work() -> None:
        args = _parser(about).parse_args(list(argv))
        run = override(base_run(args.recipe), args.assignments)
        models = dict(map(_labelled, args.model)) or _quickstarts(run)
        log_to_stderr(__package__)
        scores = measure(run, models, num_words=args.words)
        table = noise_table(scores)
        console().print(table)
        storage = absolute_storage(run.placement.storage_path)
        place = join(storage, "noise", f"noise-{args.words}-words.md")
        write_atomic(place, show(table, "markdown").encode())
        sys.stdout.write(f"Table {place}\n")

    return exit_code(work)


def measure(run: Run, models: Mapping[str, str], *, num_words: int) -> dict[str, NoiseScores]:
    """Scores of each model, by its label, with and without noise behind the texts of the tasks.

    Args:
        run: its evaluation says which tasks.
        models: label → asset reference of a saved model.

    Raises:
        RayembedError: a model, the tasks or the cluster cannot be had.
    """
    from rayembed.evaluation.on_ray import measured_on_ray
    from rayembed.pipeline.on_ray import connect
    from rayembed_papers.noise.scores import noise_scores

    connect()
    placement = run.placement
    return {
        label: measured_on_ray(
            noise_scores,
            reference,
            run,
            name=label.replace(" ", "-"),
            results_folder=join(absolute_storage(placement.storage_path), "noise"),
            num_words=num_words,
            placement=placement,
        )
        for label, reference in models.items()
    }


def noise_table(scores: Mapping[str, NoiseScores]) -> Table:
    """Tasks in rows; of each model the score, that with noise, and the drop."""
    title = "Unrelated words behind every text"
    return Table(["task", *scores], _rows(scores), title=title, align="lr")


def _rows(scores: Mapping[str, NoiseScores]) -> list[list[str]]:
    """Name of a task and `clean → noisy (−drop)` of each model; the mean last."""
    tasks = list(next(iter(scores.values())).clean)
    rows = []
    for task in tasks:
        name, score = heading(task)
        cells = [_cell(found.clean[task], found.noisy[task]) for found in scores.values()]
        rows.append([f"{name}, {score}" if score else name, *cells])
    means = [
        _cell(_mean([f.clean[t] for t in tasks]), _mean([f.noisy[t] for t in tasks]))
        for f in scores.values()
    ]
    return [*rows, ["mean", *means]]


def _cell(clean: float, noisy: float) -> str:
    return f"{clean:.3f} → {noisy:.3f} ({noisy - clean:+.3f})"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _quickstarts(run: Run) -> dict[str, str]:
    storage = absolute_storage(run.placement.storage_path)
    last = run.stages[-1].name
    return {
        label: join(storage, "runs", name, "models", last) for label, name in QUICKSTARTS.items()
    }


def _labelled(text: str) -> tuple[str, str]:
    label, equals, reference = text.partition("=")
    if not equals or not label or not reference:
        raise ConfigError(f"--model {text!r}: expected LABEL=REFERENCE, as in ours=outputs/model")
    return label, reference


def _parser(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="LABEL=REFERENCE",
        help="a saved model; may be given often. Default: the runs "
        + " and ".join(QUICKSTARTS.values()),
    )
    parser.add_argument(
        "--words",
        type=_positive,
        default=16,
        help="words of noise behind every text; default: %(default)s",
    )
    parser.add_argument(
        "--recipe",
        default=RECIPE,
        metavar="NAME|run.yaml",
        help="the run whose tasks are scored; default: %(default)s",
    )
    parser.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="path.to.setting=value",
        help="change a setting of it, evaluation.wikipedia.num_queries=50, say; may be given often",
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value
