"""The merge job: several trained models of one architecture become one."""

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayembed.config.named_benchmarks import named_benchmarks, with_own_sets
from rayembed.config.scores import Scores
from rayembed.config.settings import parse
from rayembed.errors import ArtifactError, ConfigError
from rayembed.evaluation.mteb_names import check_names
from rayembed.pipeline.evaluation_job import own_set
from rayembed.pipeline.job import Job, JobContext, names_in, option

if TYPE_CHECKING:
    from torch import Tensor

    from rayembed.models.merge import Method
    from rayembed.models.transformer_model import TransformerModel

logger = logging.getLogger(__name__)

MERGE_FILE = "merge.json"
"""File of a merged model's folder: method, models and shares."""


def merge_models(
    references: Sequence[str],
    output: Path,
    *,
    method: "Method" = "linear",
    shares: Sequence[float] | None = None,
) -> None:
    """Save the merged model in `output`, with what it was made of beside it.

    Its settings, tokenizer and prompts are those of the last model, for a base that is merged with
    its fine-tuned model stands first. One model is in memory at a time, beside the sum.

    Args:
        references: asset references of models, in the order of the shares.
        method, shares: see `rayembed.models.merge.merge`.

    Raises:
        ArtifactError: models that do not fit each other, or `output` holds something else.
        AssetError: a reference leads nowhere.
        ConfigError: shares that the method cannot take.
    """
    from rayembed.assets.resolver import resolve_model
    from rayembed.models.export import check_target
    from rayembed.models.load import load_model, saved_dtype
    from rayembed.models.merge import check_shares, merge
    from rayembed.models.saved_folder import saved_instructions

    shares = check_shares(method, len(references), shares)
    check_target(output)
    folders = [resolve_model(reference) for reference in references]
    last = load_model(folders[-1], dtype=saved_dtype(folders[-1]))

    def weights() -> Iterator[dict[str, "Tensor"]]:
        for reference, folder in zip(references, folders, strict=True):
            logger.info("reading %s", reference)
            model = load_model(folder, dtype="float32")
            _check_vocabulary(last, model, references[-1], reference)
            yield model.state_dict()

    last.load_state_dict(merge(method, weights(), shares))
    last.save(output, instructions=saved_instructions(folders[-1], last.config.template or ""))
    made_of = {"method": method, "models": list(references), "shares": list(shares)}
    (output / MERGE_FILE).write_text(json.dumps(made_of, indent=2) + "\n")


def _check_vocabulary(
    last: "TransformerModel", model: "TransformerModel", of_last: str, of_model: str
) -> None:
    words = [one.tokenizer.pretrained.get_vocab() for one in (last, model)]
    if words[0] != words[1]:
        raise ArtifactError(
            f"{of_model} cannot be merged with {of_last}: their tokenizers have other "
            "vocabularies, so that equal places of their embeddings stand for other words"
        )


def shares_in(text: str | None) -> tuple[float, ...] | None:
    """The numbers of a list with commas; None where there is none.

    Raises:
        ConfigError: one is no number.
    """
    if text is None:
        return None
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--shares {text!r} must be numbers with commas between them, such as 0.5,0.5"
        ) from None


def _merge(args: argparse.Namespace, context: JobContext) -> None:
    output, candidates = Path(args.output), [shares_in(text) for text in args.shares or [None]]
    asked = {
        "benchmarks": args.benchmarks or (),
        "tasks": args.tasks or (),
        "languages": args.languages or (),
        "own_sets": args.own_sets or (),
    }
    if not any(asked.values()):
        if len(candidates) > 1:
            raise ConfigError(
                f"{len(candidates)} candidates (--shares) and nothing to choose by: name "
                "--benchmark, --tasks or --own-set"
            )
        merge_models(args.model, output, method=args.method, shares=candidates[0])
        context.out.write(
            f"Merged model: {args.output}\n"
            f"Score it:     python jobs/evaluate_model.py --model {args.output} …\n"
        )
        return
    scores = with_own_sets(parse(Scores, asked))
    check_names("", scores, tuple(named.name for named in named_benchmarks()))
    from rayembed.pipeline.merge_choice import choose, print_choice

    choice = choose(
        args.model,
        output,
        method=args.method,
        candidates=candidates,
        scores=scores,
        storage=args.storage_path,
    )
    print_choice(choice, args.model, output, context.out)


run_merge_job = Job(
    options=(
        option("--model REFERENCE", "a model; the base first, if there is one", often=True),
        option(
            "--method {linear,slerp,task_arithmetic}",
            "weighted mean, arc between two models, or base plus weighted changes",
            default="linear",
        ),
        option(
            "--shares NUMBERS",
            "share of each model, as 0.3,0.7; default: equal ones. Given several times, the "
            "candidates of which the one with the highest mean score becomes the model",
            often=True,
        ),
        option("--output FOLDER", "where the model goes", required=True),
        option(
            "--benchmark NAME",
            "a benchmark that scores the candidates and the models, as wikipedia or NanoBEIR",
            often=True,
            dest="benchmarks",
        ),
        option("--tasks A,B", "single tasks of mteb", type=names_in),
        option("--languages eng,deu", "subsets in these only", type=names_in),
        option(
            "--own-set [NAME=]FOLDER",
            "your own corpus, queries and qrels (BEIR's layout) as a task",
            often=True,
            type=own_set,
            dest="own_sets",
        ),
        option("--storage-path FOLDER", "where scores are kept", default="outputs"),
    ),
    read=lambda args: args,
    run=_merge,
    stopped="stopped; nothing was written",
)
"""The job that merges models."""
