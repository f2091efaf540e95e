"""Activations of training in bytes a token, counted on the meta device without weights.

Counted is what torch keeps for the backward pass, on a GPU: of the pretrained parts and of a
pooling layer, beside which the rest is small.
"""

from rayembed.config.model import ModelConfig
from rayembed.config.settings import changed
from rayembed.pipeline.estimate.meta_pass import batch_on_meta, kept_bytes, model_on_meta
from rayembed.pipeline.estimate.requirements import Activations

_TEXTS, _TOKENS = 16, 32  # no more than any family has learnt positions for


def activations(config: ModelConfig, *, padded: bool = True) -> Activations | None:
    """Bytes that a token takes in training; None where the shape of a part is not known here.

    None also for a part that is no class of transformers: such packs tokens, and chooses experts,
    by values that nothing has here.

    Layers are all alike, so that a model of one and one of two tell of any number.

    Args:
        padded: whether attention has a mask, as in micro-batches with padding.

    Raises:
        ConfigError: as `requirements.model_size`.
    """
    from transformers import PreTrainedModel

    whole = model_on_meta(config)
    if whole is None or not all(isinstance(p, PreTrainedModel) for p in whole.parts.values()):
        return None
    (plain, recomputing), more = _of_layers(config, 1, padded), whole.num_layers - 1
    if not more:
        return Activations(plain, recomputing, plain)
    second = _of_layers(config, 2, padded)
    return Activations(
        plain + more * (second[0] - plain),
        recomputing + more * (second[1] - recomputing),
        second[0] - plain,
    )


def _of_layers(config: ModelConfig, number: int, padded: bool) -> tuple[float, float]:
    """Bytes a token of a model with so many layers, without and with recomputing."""
    backbone = changed(config.backbone, num_layers=number)
    model = model_on_meta(changed(config, backbone=backbone))
    assert model is not None, "its shape is known"

    def kept(texts: int) -> int:
        batch = batch_on_meta(texts, _TOKENS)
        return kept_bytes(lambda: model(batch), model.parameters(), padded=padded)

    def of_token() -> float:
        """Bytes of a further token: of what a pass keeps once nothing."""
        return (kept(2 * _TEXTS) - kept(_TEXTS)) / (_TEXTS * _TOKENS)

    plain = of_token()
    model.recompute()
    return plain, of_token()
