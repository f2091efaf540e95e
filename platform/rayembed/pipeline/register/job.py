"""Registry job: register a model, store its scores, promote it or roll back."""

import argparse
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayembed.assets.hub import check_repository_name, upload_model
from rayembed.config.placement import check_model_name
from rayembed.config.types import expanded_name
from rayembed.display.tables import console
from rayembed.errors import ConfigError
from rayembed.pipeline.job import Job, JobContext, option
from rayembed.pipeline.storage import absolute_storage
from rayembed.registry.aliases import CHAMPION
from rayembed.registry.card_parts import how_to_score
from rayembed.registry.gates import parse_requirement
from rayembed.registry.indexes import entries_of
from rayembed.registry.mlflow_run import as_tracking_error
from rayembed.registry.promote import Gates, PromotionOutcome, judge, promote, rollback
from rayembed.registry.registered_model import SCHEME, connect, parse_reference
from rayembed.registry.tracking_uri import resolve_tracking_uri

if TYPE_CHECKING:
    from rich.console import Console

    from rayembed.pipeline.register.registration import Candidate

logger = logging.getLogger(__name__)


def _work(asked: argparse.Namespace, _: JobContext) -> int:
    # A registry that has nothing is made by the first registration, by nothing else.
    made = asked.dry_run or asked.rollback or str(asked.model).startswith(SCHEME)
    client = connect(asked.tracking_uri, made=made)
    with as_tracking_error(asked.tracking_uri):
        return _roll_back(client, asked) if asked.rollback else _register(client, asked)


def _read(args: argparse.Namespace) -> argparse.Namespace:
    """Check the arguments, and derive the gates, the model's name and MLflow's address from
    them.
    """
    gates = Gates(
        tuple(parse_requirement(text) for text in args.require),
        args.better_than,
        args.tolerance or 0.0,
        tuple(args.differing),
        args.again,
        tuple(dict.fromkeys(args.index_ready)),
        args.compatible,
        absolute_storage(args.storage_path),
    )
    _check_combination(args, gates)
    name = args.name
    if name is None and str(args.model).startswith(SCHEME):
        name = parse_reference(args.model).name
    if not name:
        raise ConfigError("--name is required: the name of the model in MLflow's registry")
    try:
        check_model_name(name)
    except ValueError as error:
        raise ConfigError(f"--name {name!r}: {error}") from None
    storage = absolute_storage(args.storage_path)
    makes = not (args.dry_run or args.rollback)
    if args.push_to_hub:
        check_repository_name(args.push_to_hub)
    args.name, args.gates = name, gates
    args.tracking_uri = resolve_tracking_uri(args.tracking_uri, storage, make_folder=makes)
    return args


def _check_combination(args: argparse.Namespace, gates: Gates) -> None:
    named = bool(gates.requirements or gates.better_than is not None or gates.index_ready)
    if args.rollback and (args.promote or args.model or args.results or named or args.push_to_hub):
        raise ConfigError(
            "--rollback cannot be combined with options of a promotion; give only --name"
        )
    if args.trust_results and not args.results:
        raise ConfigError("--trust-results applies to --results; add --results FOLDER")
    if not args.rollback and not args.model:
        raise ConfigError("--model is required: a folder, hf://org/name@revision or models:/name/3")
    if args.promote and not named:
        raise ConfigError(
            "--promote needs a gate: --require 'Retrieval>=0.5' (a task, a category or 'mean'), "
            f"--better-than {CHAMPION}, or --index-ready INDEX"
        )
    if not args.promote and (named or args.again):
        raise ConfigError(
            "--require, --better-than, --index-ready and --again apply to a promotion only; add "
            "--promote"
        )
    if args.tolerance is not None and gates.better_than is None:
        raise ConfigError(f"--tolerance applies to --better-than; add --better-than {CHAMPION}")
    if gates.compatible is not None and not gates.index_ready:
        raise ConfigError("--compatible applies to --index-ready; add --index-ready INDEX")
    if gates.differing and gates.better_than is None:
        raise ConfigError(f"--differing applies to --better-than; add --better-than {CHAMPION}")


def _register(client: Any, asked: argparse.Namespace) -> int:
    """Check the model, then register it, store its scores and promote it, as the arguments say."""
    from rayembed.pipeline.register.registration import (  # torch and mteb
        find_candidate,
        own_run,
        put,
    )

    candidate = find_candidate(
        client,
        asked.model,
        asked.name,
        results=asked.results,
        trusted=asked.trust_results,
        tracking_uri=asked.tracking_uri,
    )
    out = console(soft_wrap=True)
    if asked.push_to_hub is not None and candidate.folder is None:
        raise ConfigError(
            f"--push-to-hub uploads a folder, but {asked.model!r} is a registered version; "
            "name as --model the exported folder that has the same weights"
        )
    named = None if candidate.folder is None else asked.name
    if asked.promote:
        if not candidate.scores:
            raise ConfigError(
                f"{asked.model!r} has no scores to judge; {how_to_score(asked.model, named)}"
            )
        decision = judge(
            client,
            asked.name,
            candidate.scores,
            asked.gates,
            number=candidate.number,
            weights_fingerprint=candidate.weights,
        )
        # A version that is there is judged below, where the figures are kept with it.
        refused = candidate.number is None and not decision.holds
        if asked.dry_run or refused:
            out.print(decision.table())
        if refused and not asked.dry_run:
            out.print(
                f"Nothing was registered: weights {candidate.weights}. Without --promote they "
                f"become a version of {asked.name} with these scores, and candidate"
            )
            return 1
    if asked.dry_run:
        held = not asked.promote or decision.holds
        _print_dry_run(candidate, asked, held, out)
        return 0 if held else 1
    made = put(
        client,
        candidate,
        asked.name,
        partial(own_run, candidate, asked.name, asked.tracking_uri, asked.experiment),
        # A refusal leaves all aliases as they were.
        may_be_candidate=not asked.promote,
        card_file=None if asked.card is None else Path(asked.card),
    )
    number = made.version
    out.print(f"Registry   {asked.name} version {number} ({made.uri})")
    out.print(f"Scores     {len(candidate.scores)} tasks of weights {candidate.weights}")
    for entry in entries_of(client.get_model_version(asked.name, str(number)).tags):
        out.print(f"Index      {entry.line}")
    if not candidate.scores:
        out.print(
            f"           without scores it does not become a candidate; {how_to_score(made.uri)}"
        )
    if asked.push_to_hub is not None and candidate.folder is not None:
        out.print(f"Hub        {upload_model(candidate.folder, asked.push_to_hub, made.card)}")
    if not asked.promote:
        return 0
    outcome = promote(client, asked.name, number, candidate.scores, asked.gates)
    assert outcome.decision is not None
    out.print(outcome.decision.table())
    _print_outcome(asked.name, outcome, out)
    if candidate.number is None and not outcome.decision.holds:
        out.print(
            f"Version {number} is registered all the same: the gates held before it was, and "
            "another version became champion since"
        )
    return 0 if outcome.decision.holds else 1


def _roll_back(client: Any, asked: argparse.Namespace) -> int:
    outcome = rollback(client, asked.name, dry_run=asked.dry_run)
    out = console(soft_wrap=True)
    if asked.dry_run and outcome.moved:
        out.print("Nothing is changed (--dry-run). It would be:")
    _print_outcome(asked.name, outcome, out)
    return 0


def _print_outcome(name: str, outcome: PromotionOutcome, out: "Console") -> None:
    state = "" if outcome.moved else " (as before)"
    champion = "none" if outcome.champion is None else f"version {outcome.champion}"
    previous = "none" if outcome.previous is None else f"version {outcome.previous}"
    out.print(f"Champion   {champion}{state} (models:/{name}@{CHAMPION})")
    out.print(f"Previous   {previous}")


def _print_dry_run(
    candidate: "Candidate", asked: argparse.Namespace, held: bool, out: "Console"
) -> None:
    hub = asked.push_to_hub if held else None
    if candidate.number is not None:
        what = f"version {candidate.number} is there already"
    else:
        what = f"{'a new version' if held else 'no version'} would be registered"
    out.print(
        f"Nothing is changed (--dry-run): {asked.name}, weights {candidate.weights}: {what}, "
        f"with the scores of {len(candidate.scores)} tasks"
        + ("" if candidate.scores else ", so it would be no candidate")
        + (f"; its folder would be uploaded to {hub}" if hub else "")
    )


run_register_job = Job(
    options=(
        option(
            "--model REFERENCE",
            "a folder in sentence-transformers format (what training exports), "
            "hf://org/name@revision, models:/name@alias or models:/name/3",
            type=expanded_name,
        ),
        option("--name NAME", "name in MLflow's registry; default: that of models:/name/…"),
        option(
            "--results FOLDER",
            "mteb's result files: a results folder with scores of these weights, or <results>/"
            "results/<org>__<model>/<revision>; default: the scores kept with the version",
        ),
        option(
            "--trust-results",
            "take results that do not name their weights, as those of mteb itself, as this "
            "model's; those that name other weights are refused all the same",
        ),
        option("--promote", "make the version champion if all gates hold"),
        option(
            "--require 'NAME>=NUMBER'",
            "a gate: a task, a category of tasks or 'mean', with a metric before it if it is not "
            "to be the main score: 'Retrieval>=0.5', 'ndcg_at_1 SciFact>=0.4'",
            often=True,
        ),
        option(
            "--better-than ALIAS|VERSION",
            "a gate: over the tasks that both were scored on, with the same data, the mean must "
            "not be lower than that of 'champion' (or another), no task by more than --tolerance",
        ),
        option(
            "--tolerance T", "how much lower --better-than lets a task be; default: 0", type=float
        ),
        option(
            "--differing SETTING",
            "compare with --better-than although the two were scored with another SETTING, as the "
            "refusal names it: prompts, dtype, dimensions, …",
            often=True,
        ),
        option(
            "--index-ready INDEX",
            "a gate: the index's current table was made by this version, or there is an adapter as "
            "--compatible says",
            often=True,
        ),
        option(
            "--compatible SHARE",
            "with --index-ready: an adapter will do whose share of recall, by the lower end of the "
            "interval that `rayembed upgrade` measured, is at least this, such as 0.97",
            type=float,
        ),
        option("--again", "promote also a version that was rolled back before"),
        option(
            "--rollback",
            "make the previous version champion again; doing it twice changes nothing more",
        ),
        option("--card FILE", "write the model card there, too (the hub's README.md)"),
        option(
            "--push-to-hub ORG/NAME",
            "upload the folder of --model with its card to this repository of the Hugging Face "
            "hub, which is made as a private one; HF_TOKEN must allow writing",
        ),
        option("--dry-run", "print what the gates say and what would be done; change nothing"),
        option(
            "--experiment NAME",
            "experiment in MLflow for models that were not trained here",
            default="rayembed",
        ),
        option(
            "--tracking-uri URI",
            "MLflow's address; default: the SQLite file in --storage-path",
        ),
        option(
            "--storage-path FOLDER",
            "result storage of the training jobs, and of indexes",
            default="outputs",
        ),
    ),
    read=_read,
    run=_work,
)
"""The job that registers a model; its exit code is 1 where a promotion was refused."""
