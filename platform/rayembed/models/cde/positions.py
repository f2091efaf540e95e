"""Positions and attention masks of sequences that consist of context vectors, soft prompts and a
text.

J context vectors, S soft prompts, T tokens of the longest text, L = J + S + T.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayembed.errors import ConfigError
from rayembed.models.cde.config import CDEConfig
from rayembed.models.loading.backbones import first_position, num_positions


@dataclass(frozen=True)
class SequenceLayout:
    """Computes positions and attention masks of the second encoder's sequences.

    Without positions of their own, context vectors all stand at the first one. There a rotation
    turns by nothing; a learnt vector is a constant that the biases before it can take up. Rotary
    positions of the text count on behind J + S, as released. Learnt ones of text and soft prompts
    begin as in pretraining, so that they suffice for long texts.
    """

    num_context: int
    num_prompts: int
    counted: bool
    """Whether context vectors have positions like tokens."""
    rotary: bool
    first: int
    """Position of a text's first token in pretraining."""
    window: int | None
    """Half width of the sliding attention window in layers that have one; None without such layers.
    """

    @classmethod
    def of(cls, config: CDEConfig, backbone: Any) -> "SequenceLayout":
        """Derive the layout from the settings and the backbone's kind of positions.

        Raises:
            ConfigError: a family that tells positions apart by more than `position_ids`, so that
                context documents would have an order.
        """
        modules = [name for name, _ in backbone.named_modules()]
        rotary = any("rotary" in name for name in modules)
        learnt = num_positions(backbone) is not None
        window = _window(backbone)
        if (
            "position_ids" not in inspect.signature(backbone.forward).parameters
            or any("relative_attention" in name for name in modules)
            or rotary == learnt
            or (
                learnt and not hasattr(getattr(backbone, "embeddings", None), "position_embeddings")
            )
            or (window is not None and backbone.config.model_type != "modernbert")
        ):
            raise ConfigError(
                f"model.backbone.path: an encoder of the family {backbone.config.model_type!r} "
                "computes some positions itself instead of using the given ones, so the order of "
                "context documents would matter; use NomicBERT, ModernBERT, BERT, RoBERTa or XLM-R"
            )
        if config.normalize_twice and backbone.config.model_type != "modernbert":
            raise ConfigError(
                "model.normalize_twice=true reproduces the released CDE v2, a ModernBERT; in the "
                f"family {backbone.config.model_type!r} it would add position or token-type "
                "embeddings twice; set it to false"
            )
        return cls(
            num_context=config.num_context,
            num_prompts=config.num_soft_prompts,
            counted=config.context_positions == "counted",
            rotary=rotary,
            first=first_position(backbone),
            window=window,
        )

    def num_positions(self, num_tokens: int) -> int:
        """Return the number of positions that a text of this many tokens needs, with context and
        soft prompts.
        """
        before = self.num_context + self.num_prompts if self.counted or self.rotary else 0
        return before + num_tokens

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """(1, L) position of each vector, int64 on the device."""
        context, prompts = self.num_context, self.num_prompts
        if self.counted:
            places = torch.arange(context + prompts + num_tokens, device=device)
        elif self.rotary:
            behind = torch.arange(context, context + prompts + num_tokens, device=device)
            places = torch.cat([behind.new_zeros(context), behind])
        else:
            behind = torch.arange(num_tokens, device=device)
            places = torch.cat([behind.new_zeros(context + prompts), behind])
        return (self.first + places).unsqueeze(0)

    @property
    def needs_mask(self) -> bool:
        """Whether layers with a sliding window need an explicit mask, so that all tokens see the
        context vectors.
        """
        return self.window is not None and not self.counted

    def attention_mask(self, mask: Tensor) -> Tensor | dict[str, Tensor]:
        """Build the backbone's attention mask: every vector attends to the context, none to
        padding.

        Layers with a sliding window would see those context vectors alone that stand near in the
        sequence; where context has no positions, the window holds between the others only.

        Args:
            mask: (B, L) int64, 0 where padding stands.
        """
        if self.window is None or not self.needs_mask:
            return mask
        length = mask.shape[1]
        full = mask.bool()[:, None, None, :].expand(-1, 1, length, -1)
        places = torch.arange(length, device=mask.device)
        near = (places[:, None] - places[None, :]).abs() <= self.window
        anywhere = places < self.num_context
        near = near | anywhere[:, None] | anywhere[None, :]
        return {"full_attention": full, "sliding_attention": full & near}


def _window(backbone: Any) -> int | None:
    settings = backbone.config
    if "sliding_attention" not in (getattr(settings, "layer_types", None) or ()):
        return None
    window: int = settings.sliding_window
    return window
