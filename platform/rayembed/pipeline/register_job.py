"""The registry job from its arguments to a decision: register, score, promote, roll back."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayembed.config.placement import check_model_name
from rayembed.errors import ConfigError
from rayembed.pipeline.command_line import exit_code, log_to_stderr
from rayembed.pipeline.registration import Candidate, find_candidate, own_run, put
from rayembed.pipeline.storage import absolute_storage
from rayembed.registry.aliases import CHAMPION
from rayembed.registry.card_parts import how_to_score
from rayembed.registry.gates import parse_requirement
from rayembed.registry.mlflow_run import as_tracking_error
from rayembed.registry.promote import Gates, Outcome, judge, promote, rollback
from rayembed.registry.registered_model import SCHEME, connect, parse_reference
from rayembed.registry.tracking_uri import resolve_tracking_uri
from rayembed.tables import console

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """What the registry job is asked to do."""

    name: str
    """Of the registered model."""
    model: str | None
    """None: a rollback, which needs no model."""
    results: str | None
    trust_results: bool
    promote: bool
    rollback: bool
    gates: Gates
    dry_run: bool
    card: str | None
    experiment: str
    tracking_uri: str


def run_register_job(argv: Sequence[str], *, about: str | None) -> int:
    """The exit code: 0, 1 when a promotion was refused or something failed, 2 when asked wrongly.

    Errors that a user can act on are printed as their message, without a traceback.

    Args:
        argv: arguments without the script's name.
        about: what `--help` begins with.
    """

    def work() -> int:
        asked = resolve(argv, about=about)
        log_to_stderr()
        # A registry that has nothing is made by the first registration, by nothing else.
        made = asked.dry_run or asked.rollback or str(asked.model).startswith(SCHEME)
        client = connect(asked.tracking_uri, made=made)
        with as_tracking_error(asked.tracking_uri):
            return _roll_back(client, asked) if asked.rollback else _register(client, asked)

    return exit_code(work)


def resolve(argv: Sequence[str], *, about: str | None = None) -> Asked:
    """What the arguments ask for.

    Raises:
        ConfigError: arguments that contradict each other, or a gate that is none.
        SystemExit: as argparse has it, for `--help` (0) and unknown options (2).
    """
    args = _parser(about).parse_args(list(argv))
    gates = Gates(
        tuple(parse_requirement(text) for text in args.require),
        args.better_than,
        args.tolerance or 0.0,
        tuple(args.differing),
        args.again,
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
    return Asked(
        name=name,
        model=args.model,
        results=args.results,
        trust_results=args.trust_results,
        promote=args.promote,
        rollback=args.rollback,
        gates=gates,
        dry_run=args.dry_run,
        card=args.card,
        experiment=args.experiment,
        tracking_uri=resolve_tracking_uri(args.tracking_uri, storage),
    )


def _check_combination(args: argparse.Namespace, gates: Gates) -> None:
    named = bool(gates.requirements or gates.better_than is not None)
    if args.rollback and (args.promote or args.model or args.results or named):
        raise ConfigError("--rollback stands alone: give it --name, and nothing of a promotion")
    if args.trust_results and not args.results:
        raise ConfigError("--trust-results is about those of --results; add --results FOLDER")
    if not args.rollback and not args.model:
        raise ConfigError("--model is required: a folder, hf://org/name@revision or models:/name/3")
    if args.promote and not named:
        raise ConfigError(
            "--promote needs a gate: --require 'Retrieval>=0.5' (a task, a category or 'mean'), "
            f"--better-than {CHAMPION}, or both"
        )
    if not args.promote and (named or args.again):
        raise ConfigError("gates are asked before a promotion only; add --promote")
    if args.tolerance is not None and gates.better_than is None:
        raise ConfigError(f"--tolerance is that of --better-than; add --better-than {CHAMPION}")
    if gates.differing and gates.better_than is None:
        raise ConfigError(f"--differing is about --better-than; add --better-than {CHAMPION}")
    if gates.tolerance < 0:
        raise ConfigError(f"--tolerance {gates.tolerance} must not be negative")


def _register(client: Any, asked: Asked) -> int:
    """Register what is asked, keep its scores, promote it; nothing is changed before all checks."""
    assert asked.model is not None
    candidate = find_candidate(
        client,
        asked.model,
        asked.name,
        results=asked.results,
        trusted=asked.trust_results,
        tracking_uri=asked.tracking_uri,
    )
    out = console(soft_wrap=True)
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
    if not candidate.scores:
        out.print(f"           without scores it is no candidate; {how_to_score(made.uri)}")
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


def _roll_back(client: Any, asked: Asked) -> int:
    outcome = rollback(client, asked.name, dry_run=asked.dry_run)
    out = console(soft_wrap=True)
    if asked.dry_run and outcome.moved:
        out.print("Nothing is changed (--dry-run). It would be:")
    _print_outcome(asked.name, outcome, out)
    return 0


def _print_outcome(name: str, outcome: Outcome, out: "Console") -> None:
    state = "" if outcome.moved else " (as before)"
    champion = "none" if outcome.champion is None else f"version {outcome.champion}"
    previous = "none" if outcome.previous is None else f"version {outcome.previous}"
    out.print(f"Champion   {champion}{state} (models:/{name}@{CHAMPION})")
    out.print(f"Previous   {previous}")


def _print_dry_run(candidate: Candidate, asked: Asked, held: bool, out: "Console") -> None:
    if candidate.number is not None:
        what = f"version {candidate.number} is there already"
    else:
        what = f"{'a new version' if held else 'no version'} would be registered"
    out.print(
        f"Nothing is changed (--dry-run): {asked.name}, weights {candidate.weights}: {what}, "
        f"with the scores of {len(candidate.scores)} tasks"
        + ("" if candidate.scores else ", so it would be no candidate")
    )


def _parser(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--model",
        metavar="REFERENCE",
        help="a folder in sentence-transformers format (what training exports), "
        "hf://org/name@revision, models:/name@alias or models:/name/3",
    )
    add("--name", help="in MLflow's registry; of models:/name/… its own unless another is given")
    add(
        "--results",
        metavar="FOLDER",
        help="mteb's result files: a results folder with scores of these weights, or "
        "<results>/results/<org>__<model>/<revision>; default: the scores kept with the version",
    )
    add(
        "--trust-results",
        action="store_true",
        help="take results that do not name their weights, as those of mteb itself, as this "
        "model's; those that name other weights are refused all the same",
    )
    add("--promote", action="store_true", help="make the version champion if all gates hold")
    add(
        "--require",
        action="append",
        default=[],
        metavar="'NAME>=NUMBER'",
        help="a gate; may be given often: a task, a category of tasks or 'mean', with a metric "
        "before it if it is not to be the main score: 'Retrieval>=0.5', 'ndcg_at_1 SciFact>=0.4'",
    )
    add(
        "--better-than",
        metavar="ALIAS|VERSION",
        help="a gate: over the tasks that both were scored on, with the same data, the mean must "
        "not be lower than that of 'champion' (or another), and no task by more than --tolerance",
    )
    add("--tolerance", type=float, metavar="T", help="default: 0")
    add(
        "--differing",
        action="append",
        default=[],
        metavar="SETTING",
        help="compare with --better-than although the two were scored with another SETTING, as the "
        "refusal names it: prompts, dtype, dimensions, …; may be given often",
    )
    add("--again", action="store_true", help="also a version that was rolled back before")
    add(
        "--rollback",
        action="store_true",
        help="make the previous version champion again; doing it twice changes nothing more",
    )
    add("--card", metavar="FILE", help="write the model card there, too (the hub's README.md)")
    add(
        "--dry-run",
        action="store_true",
        help="print what the gates say and what would be done; change nothing",
    )
    add("--experiment", default="rayembed", help="of MLflow, for models that were not trained here")
    add("--tracking-uri", help="MLflow's address; default: the SQLite file in --storage-path")
    add("--storage-path", default="outputs", help="of the training jobs; default: %(default)s")
    return parser
