"""Rotary position embeddings of a transformers configuration."""

from typing import Any

from rayembed.config.backbone import RopeConfig
from rayembed.errors import ConfigError


def set_rope(settings: Any, rope: RopeConfig) -> None:
    """Write base and scaling of rotary position embeddings into a transformers configuration, in
    place; twice is as once.

    Raises:
        ConfigError: the family has no rotary position embeddings, or pretraining has scaled them.
    """
    parameters = getattr(settings, "rope_parameters", None)
    if not parameters:
        raise ConfigError(
            f"model.backbone.rope is set, but models of the family {settings.model_type!r} have "
            "no rotary position embeddings; set it to null, or use another backbone"
        )
    # Families whose layers are of several types have those of each.
    whole = dict(parameters.get("full_attention", parameters))
    if rope.base is not None:
        whole["rope_theta"] = rope.base
    if rope.factor > 1:
        _check_unscaled(whole)
        first = whole.get("original_max_position_embeddings", settings.max_position_embeddings)
        whole |= {"rope_type": rope.scaling, "factor": rope.factor}
        whole["original_max_position_embeddings"] = first
        settings.max_position_embeddings = round(first * rope.factor)
    by_layer = "full_attention" in parameters
    settings.rope_parameters = {**parameters, "full_attention": whole} if by_layer else whole


def _check_unscaled(whole: dict[str, Any]) -> None:
    """Raise if embeddings are scaled already, unless as `set_rope` does."""
    kind = whole.get("rope_type", "default")
    written = {"rope_type", "factor", "original_max_position_embeddings"}
    known = {*written, "rope_theta", "partial_rotary_factor"}
    is_own = kind in ("linear", "yarn") and written <= whole.keys() <= known
    if kind != "default" and not is_own:
        raise ConfigError(
            f"model.backbone.rope.factor would replace the scaling {kind!r} that the model was "
            "pretrained with; leave the factor out, and set rope.base alone if at all"
        )
