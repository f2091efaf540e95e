"""Promote a version to `champion` if its gates are met, and roll back."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rayembed.errors import ArtifactError, ConfigError
from rayembed.registry.aliases import (
    CHAMPION,
    PREVIOUS,
    ROLLED_BACK_TAG,
    Move,
    alias_version,
    turn,
)
from rayembed.registry.gates import Check, Comparison, Decision, Requirement, decide
from rayembed.registry.indexes import ReadyQuestion, index_ready
from rayembed.registry.mlflow_run import find_model_versions
from rayembed.registry.registered_model import (
    SCHEME,
    ModelReference,
    get_version,
    read_scores,
    weights_of,
)
from rayembed.results.scores import TaskScore

DECISION_TAG = "rayembed.promotion"
"""Tag of a version with its last gate decision and the artifact that holds the figures."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gates:
    """Gates that a version must pass to become champion."""

    requirements: tuple[Requirement, ...] = ()
    better_than: str | None = None
    """Alias or number of the version to compare with; None for no comparison."""
    tolerance: float = 0.0
    differing: tuple[str, ...] = ()
    """Settings in which the evaluations of the two versions may differ."""
    again: bool = False
    """Whether a version that was rolled back may become champion again."""
    index_ready: tuple[str, ...] = ()
    """Indexes that must serve queries of the version."""
    compatible: float | None = None
    """Smallest share of recall with which an adapter makes an index ready; None: only a table that
    the version itself made."""
    storage: str = "outputs"
    """Storage path of the indexes' records."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise ConfigError(f"the tolerance {self.tolerance} must be a finite number, 0 or more")
        if self.compatible is not None and not 0 < self.compatible <= 1:
            raise ConfigError(
                f"--compatible {self.compatible} must be a share above 0 and at most 1, such as "
                "0.97"
            )


@dataclass(frozen=True)
class PromotionOutcome:
    """Result of a promotion or a rollback: the decision and the versions of the aliases."""

    champion: int | None
    previous: int | None
    moved: bool
    decision: Decision | None = None
    """Gate decision; None for a rollback."""


def judge(
    client: Any,
    name: str,
    scores: Sequence[TaskScore],
    gates: Gates,
    *,
    number: int | None,
    weights_fingerprint: str,
) -> Decision:
    """Evaluate a version's gates without changing anything.

    Args:
        number: of the version; None: it is still to be registered.

    Raises:
        ConfigError: a gate that these scores cannot judge.
        ArtifactError: the version to compare with is not there or has no scores.
    """
    comparison, told = _comparison(client, name, gates, number)
    subject = (
        f"{name}/{number}" if number is not None else f"{name} (weights {weights_fingerprint})"
    )
    decision = decide(subject, scores, gates.requirements, comparison)
    checks = (*decision.checks, *told, *_index_checks(gates, name, number, weights_fingerprint))
    if number is not None:
        tag = get_version(client, ModelReference(name, number, None)).tags.get(ROLLED_BACK_TAG)
        if tag and not gates.again:
            note = f"rolled back at {tag}; --again lifts this gate"
            checks = (*checks, Check("never rolled back", None, None, holds=False, note=note))
    return Decision(subject, checks)


def promote(
    client: Any, name: str, number: int, scores: Sequence[TaskScore], gates: Gates
) -> PromotionOutcome:
    """Move `champion` to the version if all gates are met; `previous` then points to the former
    champion.

    Judged and moved within one turn (see `aliases`), so that the champion that the version is
    compared with is the one that it replaces. The decision is kept as a tag of the version and
    as an artifact of its run, also when it is a refusal, which leaves all aliases as they were.

    Raises:
        ConfigError, ArtifactError: as `judge`.
        TrackingError: as `aliases.turn`.
    """
    version = get_version(client, ModelReference(name, number, None))
    weights = weights_of(version)
    with turn(client, name) as move:
        champion = alias_version(client, name, CHAMPION)
        decision = judge(client, name, scores, gates, number=number, weights_fingerprint=weights)
        moved = decision.holds and champion != number
        place = _keep(client, version, weights, decision)  # before it has consequences
        if moved:
            previous = champion if champion is not None else alias_version(client, name, PREVIOUS)
            move(Move(number, None if previous == number else previous, champion))
        now = (alias_version(client, name, CHAMPION), alias_version(client, name, PREVIOUS))
    told = {"gates": "hold" if decision.holds else "do not hold", "figures": place}
    client.set_model_version_tag(name, str(number), DECISION_TAG, json.dumps(told))
    return PromotionOutcome(now[0], now[1], moved, decision)


def rollback(client: Any, name: str, *, dry_run: bool = False) -> PromotionOutcome:
    """Swap `champion` and `previous`.

    The version that is taken back is marked. A second rollback would return to it, and is what a
    command that is run twice asks for, so it changes nothing.

    Raises:
        ArtifactError: there is no champion or no previous version.
        TrackingError: as `aliases.turn`.
    """
    if not find_model_versions(client, name):
        raise ArtifactError(
            f"MLflow has no registered model {name!r} with a version; register one first "
            "(rayembed register)"
        )
    if dry_run:
        return _rolled_back(client, name, None)
    with turn(client, name) as move:
        return _rolled_back(client, name, move)


def _rolled_back(client: Any, name: str, move: Any) -> PromotionOutcome:
    champion = alias_version(client, name, CHAMPION)
    previous = alias_version(client, name, PREVIOUS)
    if champion is None:
        raise ArtifactError(f"the registered model {name!r} has no champion to roll back")
    if previous is None or previous == champion:
        raise ArtifactError(
            f"the registered model {name!r} has no previous version to roll back to; its champion "
            f"stays version {champion}"
        )
    former = get_version(client, ModelReference(name, previous, None))
    if ROLLED_BACK_TAG in former.tags:
        _logger.warning(
            "rollback skipped: version %d of %s was already rolled back at %s, so version "
            "%d stays the champion (use --promote --again to make the rolled-back version "
            "champion)",
            previous,
            name,
            former.tags[ROLLED_BACK_TAG],
            champion,
        )
        return PromotionOutcome(champion, previous, moved=False)
    if move is not None:
        move(Move(previous, champion, champion, rolled_back=True))
    return PromotionOutcome(previous, champion, moved=True)


def _index_checks(
    gates: Gates, name: str, number: int | None, weights_fingerprint: str
) -> list[Check]:
    """Check that each index that the gates name serves queries of the version."""
    reference = "MODEL" if number is None else f"{SCHEME}{name}/{number}"
    return [
        index_ready(
            ReadyQuestion(gates.storage, index, weights_fingerprint, gates.compatible, reference)
        )
        for index in gates.index_ready
    ]


def _comparison(
    client: Any, name: str, gates: Gates, number: int | None
) -> tuple[Comparison | None, list[Check]]:
    """Return the other version's scores to compare with, or a check that states why no comparison
    is needed.
    """
    if gates.better_than is None:
        return None, []
    gate = f"not worse than {gates.better_than}"
    by_number = gates.better_than.isdigit()
    other = int(gates.better_than) if by_number else alias_version(client, name, gates.better_than)
    if other is None:
        if gates.better_than != CHAMPION:
            get_version(client, ModelReference(name, None, gates.better_than))
        return None, [Check(gate, None, None, holds=True, note="there is no champion yet")]
    if other == number:
        return None, [Check(gate, None, None, holds=True, note="it is this version itself")]
    scores = read_scores(client, get_version(client, ModelReference(name, other, None)))
    if not scores:
        raise ArtifactError(
            f"version {other} of {name!r} ({gates.better_than}) has no scores to compare with; "
            f"store some first: rayembed register --model models:/{name}/{other} --results FOLDER"
        )
    return Comparison(other, scores, gates.tolerance, gates.differing), []


def _keep(client: Any, version: Any, weights: str, decision: Decision) -> str:
    """Store the decision as an artifact of the version's run, and return the artifact's path."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    place = f"scores/{weights}/decisions/{stamp}-{'held' if decision.holds else 'refused'}"
    client.log_text(version.run_id, decision.to_markdown(), f"{place}.md")
    client.log_text(version.run_id, decision.to_json(), f"{place}.json")
    return f"{place}.json"
