"""Run the merge job: average models by given shares, or choose the shares by scores."""

import argparse
import shlex
from pathlib import Path

from rayembed.config.named_benchmarks import with_own_sets
from rayembed.config.own_sets import Scores
from rayembed.config.settings import parse
from rayembed.config.types import expanded_name
from rayembed.errors import ConfigError
from rayembed.pipeline.evaluate.job import check_task_names, score_options
from rayembed.pipeline.job import Job, JobContext, finite_number, option


def shares_in(text: str | None) -> tuple[float, ...] | None:
    """Parse numbers separated by commas; None for an empty list.

    Raises:
        ConfigError: one is no number.
    """
    if text is None:
        return None
    try:
        return tuple(finite_number(number) for number in text.split(","))
    except argparse.ArgumentTypeError:
        raise ConfigError(
            f"--shares {text!r} must be numbers with commas between them, such as 0.5,0.5"
        ) from None


_SCORED_ON = score_options(
    "a benchmark that scores the candidates and the models, as wikipedia or NanoBEIR"
)


def _merge(args: argparse.Namespace, context: JobContext) -> None:
    output, candidates = Path(args.output), [shares_in(text) for text in args.shares or [None]]
    asked = {str(each.sets): each.value(args) or () for each in _SCORED_ON}
    if any(asked.values()):
        scores = with_own_sets(parse(Scores, asked))
        check_task_names(scores)
    elif len(candidates) > 1:
        raise ConfigError(
            f"--shares gives {len(candidates)} candidates, but there are no tasks to choose the "
            "best by; add --benchmark, --tasks or --own-set"
        )
    # torch and mteb; the rest of the job needs none of them.
    from rayembed_extras.merging.merge import merge_best, merge_given, print_choice

    if not any(asked.values()):
        merge_given(
            args.model, output, method=args.method, shares=candidates[0], density=args.density
        )
        context.out.write(
            f"Merged model: {args.output}\n"
            f"Score it:     rayembed evaluate --model {shlex.quote(args.output)} …\n"
        )
        return
    choice = merge_best(
        args.model,
        output,
        method=args.method,
        density=args.density,
        candidates=candidates,
        scores=scores,
        storage=args.storage_path,
    )
    print_choice(choice, args.model, output, context.out)


run_merge_job = Job(
    options=(
        option(
            "--model REFERENCE",
            "a model, or a checkpoint of a run's stage; the base first, if there is one",
            often=True,
            type=expanded_name,
        ),
        option(
            "--method {linear,slerp,task_arithmetic,ties,dare}",
            "weighted mean, arc between two models, or base plus weighted changes: all, the "
            "largest, or a random part",
            default="linear",
        ),
        option(
            "--density NUMBER",
            "share of the changes that ties and dare keep; default: 0.2",
            type=finite_number,
        ),
        option(
            "--shares NUMBERS",
            "share of each model, as 0.3,0.7; default: equal ones. Given several times, the "
            "candidates of which the one with the highest mean score becomes the model",
            often=True,
        ),
        option("--output FOLDER", "where the model goes", required=True),
        *_SCORED_ON,
        option("--storage-path FOLDER", "where scores are kept", default="outputs"),
    ),
    read=lambda args: args,
    run=_merge,
    stopped="stopped; no merged model was written",
)
"""The job that merges models."""
