"""Rotary position embeddings of a transformers configuration."""

from typing import Any

from rayembed.config.backbone import RopeConfig
from rayembed.errors import ConfigError


def set_rope(settings: Any, rope: RopeConfig) -> None:
    """Write base and scaling of rotary position embeddings into a transformers configuration, in
    place; twice is as once.

    Raises:
        ConfigError: the family has no rotary position embeddings.
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
        first = whole.get("original_max_position_embeddings", settings.max_position_embeddings)
        whole |= {"rope_type": rope.scaling, "factor": rope.factor}
        whole["original_max_position_embeddings"] = first
        settings.max_position_embeddings = round(first * rope.factor)
    by_layer = "full_attention" in parameters
    settings.rope_parameters = {**parameters, "full_attention": whole} if by_layer else whole
