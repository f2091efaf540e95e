"""Remove layers or vocabulary entries of a transformer in place, from weights and configuration."""

from collections.abc import Sequence
from typing import Any

import torch

from rayembed.errors import ConfigError
from rayembed.models.layers import keep_rows, replace_layers
from rayembed.models.loading.backbones import first_position

_KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Settings with an entry for each layer."""


def keep_layers(model: Any, kept: Sequence[int]) -> None:
    """Keep only the selected layers of a transformer in place, in its configuration too.

    Raises:
        ConfigError: its configuration gives layers their kind by a pattern of their places, which
            the layers that are left do not follow.
    """
    import transformers

    settings, whole = model.config, model.config.num_hidden_layers
    replace_layers(model, kept)
    settings.num_hidden_layers = len(kept)
    for name in _KINDS_OF_LAYERS:
        if len(kinds := getattr(settings, name, None) or ()) == whole:
            setattr(settings, name, [kinds[layer] for layer in kept])
    with torch.device("meta"):
        wanted = transformers.AutoModel.from_config(settings, trust_remote_code=False)
    shapes = [{n: p.shape for n, p in one.named_parameters()} for one in (wanted, model)]
    if shapes[0] != shapes[1]:
        differ = sorted(
            {n for n in shapes[0].keys() | shapes[1].keys() if shapes[0].get(n) != shapes[1].get(n)}
        )
        raise ConfigError(
            f"layers {list(kept)} of {whole} cannot be kept: in models of the type "
            f"{settings.model_type!r} the kind of a layer follows from its position, and "
            f"{differ[0]!r} would change; keep layers so that the kinds alternate as before"
        )


def keep_words(model: Any, kept: Sequence[int]) -> None:
    """Keep only the selected word vectors of a transformer, and renumber the token ids in its
    configuration.

    Raises:
        ConfigError: other weights go by the ids, or positions are counted from the padding's id.
    """
    settings, words = model.config, model.get_input_embeddings()
    new = {old: number for number, old in enumerate(kept)}
    rows = words.num_embeddings
    others = [n for n, p in model.named_parameters() if p is not words.weight and len(p) == rows]
    if others and rows not in (settings.hidden_size, getattr(settings, "intermediate_size", None)):
        raise ConfigError(
            f"vocabulary: in models of the type {settings.model_type!r}, {others[0]!r} also has a "
            "row for each token; such vocabularies cannot be reduced"
        )
    first = first_position(model)
    pad = first - 1
    if first and new.get(pad) != pad:
        raise ConfigError(
            f"vocabulary: models of the type {settings.model_type!r} count positions from the "
            f"padding token's id {pad}, which would become {new.get(pad)}; such vocabularies "
            "cannot be reduced"
        )
    keep_rows(words, new)
    settings.vocab_size = len(kept)
    for name, value in list(vars(settings).items()):
        if name.endswith("_token_id") and value is not None:
            ids = [new.get(one) for one in value] if isinstance(value, list) else new.get(value)
            setattr(settings, name, ids)
