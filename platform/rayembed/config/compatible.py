"""Settings of a stage that keeps the trained model's vectors in the space of an old model."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import PositiveFloat, model_validator

from rayembed.config.credentials import refuse_credentials
from rayembed.config.loss import LOSSES, LossConfig
from rayembed.config.mining import Teacher
from rayembed.config.settings import Settings
from rayembed.config.types import ModelReference

DISTILLATION = "vector_distillation"
"""Kind of the loss that keeps vectors where a teacher's are."""

MAX_LENGTH = 512
"""Tokens that the old model reads of a text, as in an evaluation; `teachers.0.max_length` sets
another number."""


WEIGHT, OLD_DOCUMENTS = 0.05, 0.3
"""Weight of the distance, and share of InfoNCE over old documents, where a stage's InfoNCE had no
teacher beside it. Measured (docs/distillation.md): a larger weight costs quality and keeps no
more."""


class OldModel(Settings):
    """Settings of the old model with which a trained model stays compatible; the reference alone
    stands for it with the other settings at their defaults.
    """

    model: ModelReference
    """Asset reference or registered model (`models:/name@alias`) that embedded the index."""
    weight: PositiveFloat | None = None
    """Factor of the distance to the old vectors, where InfoNCE has 1. It is stored as its inverse,
    `loss.infonce_weight`; None: as that says, or 0.05 where the loss is `infonce`."""

    @model_validator(mode="before")
    @classmethod
    def _from_reference(cls, values: Any) -> Any:
        return {"model": values} if isinstance(values, str) else values


def with_old_model(values: Any) -> Any:
    """Replace a stage's plain `loss` and `teachers` by the ones that its `compatible_with` stands
    for.

    Values that hold them already stay as they are, so that a run's file reads back to the same run.
    A single teacher keeps its settings and becomes the old model.
    """
    asked = values.get("compatible_with") if isinstance(values, Mapping) else None
    if asked is None:
        return values
    given = values.get("loss", LOSSES.default)
    if not all(isinstance(value, str | Mapping | Settings) for value in (asked, given)):
        return values  # refused by their own validation
    old = {"model": asked} if isinstance(asked, str) else dict(asked)
    loss = {"kind": given} if isinstance(given, str) else dict(given)
    kind = loss.setdefault("kind", LOSSES.default)
    if kind == "infonce":
        loss["kind"] = kind = DISTILLATION
        loss["infonce_weight"] = 1 / WEIGHT
        loss.setdefault("teacher_documents", OLD_DOCUMENTS)
        if "temperature" in loss:
            loss["infonce_temperature"] = loss.pop("temperature")
    if kind != DISTILLATION or "model" not in old:
        return values
    if loss.get("projection") is None:
        loss["projection"] = False
    if (weight := _positive(old.get("weight"))) is not None:
        loss["infonce_weight"], old["weight"] = 1 / weight, None
    teachers = values.get("teachers") or [{"max_length": MAX_LENGTH}]
    if len(teachers) == 1 and isinstance(teachers[0], Mapping | Settings):
        refuse_credentials(str(dict(teachers[0]).get("teacher", "")))  # it is replaced
        teachers = [{**dict(teachers[0]), "teacher": old["model"]}]
    return {**values, "compatible_with": old, "loss": loss, "teachers": teachers}


def _positive(weight: Any) -> float | None:
    """Return the weight as a number; None if there is none or if it is no valid weight."""
    try:
        number = float(weight)
    except (TypeError, ValueError):
        return None
    return number if 0 < number < float("inf") else None


def check_compatible(
    stage: str, old: OldModel, loss: LossConfig, teachers: Sequence[Teacher]
) -> None:
    """Check that a stage's loss keeps vectors in the old model's space.

    Raises:
        ValueError: it does not, or the stage has further teachers.
    """
    if loss.kind != DISTILLATION:
        raise ValueError(
            f"stage {stage!r}: compatible_with adds the distance to the old model's vectors to "
            f"InfoNCE, which the loss {loss.kind!r} does not allow; set stages.{stage}.loss.kind="
            f"infonce, or {DISTILLATION} with settings of its own"
        )
    if getattr(loss, "projection", None) is not False:
        raise ValueError(
            f"stage {stage!r}: loss.projection is true, but with compatible_with the model's own "
            "vectors must lie in the old model's space, without a matrix that is not exported; "
            "set it to false"
        )
    if (named := [teacher.teacher for teacher in teachers]) != [old.model]:
        raise ValueError(
            f"stage {stage!r}: compatible_with names {old.model!r}, which must be the only teacher "
            f"of the stage, but teachers names {', '.join(map(repr, named))}; set "
            f"stages.{stage}.teachers=[]"
        )
