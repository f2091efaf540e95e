"""Decide whether a model's micro-batches are packed or padded.

Packed where a GPU has a kernel for the attention of all parts. Families of transformers differ in
what they hand to their attention, so each is tried: a few packed texts must give the states that
each of them gives alone.
"""

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rayembed.errors import ConfigError
from rayembed.machine.hardware import ran_out, say_once
from rayembed.models.attention.packed import Packed, packed_states
from rayembed.models.attention.short_texts import NAME
from rayembed.models.attention.varlen import settled_kernel
from rayembed.models.contract import EmbeddingModel, PackingTokenizer
from rayembed.models.loading.backbones import attention_dropout, first_position, num_positions

_LONGEST = 1026
"""Maximum tokens of a text in the trial; wider windows than that are taken on trust."""

_TOLERANCE = 1e-3
_TOLERANCE_OF_HALF = 0.05
"""Maximum difference of the states by their norm, in float32 and in a type of 16 bits. In bfloat16
all-MiniLM-L6-v2 differs by 0.011, SmolLM2-135M (30 layers) by 0.017."""

_FULL = 4
"""Bytes of a number in float32."""

_Reason = str | None
_trials: WeakKeyDictionary[nn.Module, dict[object, _Reason]] = WeakKeyDictionary()
"""What a part's trial on a device and in a number type has shown."""


def packs(model: EmbeddingModel) -> bool:
    """Decide whether the model's micro-batches are packed, by its `unpadded` setting, its parts and
    its device.

    The first call after a move to a device runs a few texts through the model's parts.

    Raises:
        ConfigError: the setting is `always` and the model needs padded ones.
    """
    weight = next(model.parameters(), None)
    if model.unpadded == "never" or weight is None:
        return False
    device = weight.device.type
    if model.unpadded == "auto" and device != "cuda":
        return False
    # Before the model's parts are tried, which then is with the kernel that they will have.
    kernel = settled_kernel(weight.device)
    reason = _why_padded(model)
    if reason is None:
        say_once(logging.INFO, f"texts are packed: attention without padding by {kernel}")
        return True
    if model.unpadded == "always":
        raise ConfigError(f"unpadded=always, but texts must be padded: {reason}; set unpadded=auto")
    say_once(logging.INFO, f"texts are padded: {reason}")
    return False


def _why_padded(model: EmbeddingModel) -> str | None:
    if not model.takes_packed:
        return f"{type(model).__name__} takes no packed ones"
    if not isinstance(model.tokenizer, PackingTokenizer):
        return "the tokenizer packs none"
    return model.why_padded()


def why_part_padded(name: str, part: Any) -> str | None:
    """Return the reason why a transformers model needs padded texts on its device and in its train
    or eval mode; None if it can read packed ones.

    Args:
        name: of the part, for the reason.
    """
    if part.training and attention_dropout(part.config) > 0:
        return f"unpadded attention has no dropout, and the {name} trains with some"
    if getattr(part.config, "_attn_implementation", None) != NAME:
        return f"the {name} chooses its attention itself"
    window = getattr(part.config, "sliding_window", None) or 0
    stated = getattr(part.config, "max_position_embeddings", None)
    most = min(num_positions(part) or _LONGEST, stated or _LONGEST, _LONGEST)
    first = first_position(part)

    def alone(ids: Tensor) -> Tensor:
        seen = torch.ones_like(ids).unsqueeze(0)
        states: Tensor = part(input_ids=ids.unsqueeze(0), attention_mask=seen).last_hidden_state
        return states.squeeze(0)

    def together(ids: Tensor, packed: Packed, positions: Tensor) -> Tensor:
        return packed_states(part, packed, first + positions, input_ids=ids)

    return why_not_alike(name, part, alone, together, min(max(9, window + 3), most))


def why_not_alike(
    name: str,
    part: Any,
    alone: Callable[[Tensor], Tensor],
    together: Callable[[Tensor, Packed, Tensor], Tensor],
    longest: int,
) -> str | None:
    """Run packed texts through a transformers model; return the reason if hidden states differ from
    single texts' states, None if they are equal.

    Args:
        alone: states (T, H) of one text's ids (T,).
        together: states (T, H) of packed texts' ids and positions (T,).
        longest: tokens of the longest text tried.
    """
    known = _trials.setdefault(part, {})
    state = (next(part.parameters()).device, _computes_in_half(part))
    if state not in known:
        known[state] = _trial(name, part, alone, together, longest)
    return known[state]


def _computes_in_half(part: nn.Module) -> bool:
    """Whether a transformers model computes matrix products in 16 bits: some of its weights have 16
    bits, or autocast is on.
    """
    weights = list(part.parameters())
    halved = any(weight.is_floating_point() and weight.itemsize < _FULL for weight in weights)
    return halved or torch.is_autocast_enabled(weights[0].device.type)


def _trial(
    name: str,
    part: Any,
    alone: Callable[[Tensor], Tensor],
    together: Callable[[Tensor, Packed, Tensor], Tensor],
    longest: int,
) -> str | None:
    device = next(part.parameters()).device
    last = int(part.config.vocab_size) - 1
    lengths = [2, longest, 5]
    # The same for any random state; small ids stand for special tokens, such as padding.
    places = torch.arange(sum(lengths), device=device)
    ids = last - (places * 7) % max(1, last // 2)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    was_training = part.training
    part.eval()
    try:
        with torch.no_grad():
            expected = torch.cat([alone(one) for one in torch.split(ids, lengths)]).float()
            packed = Packed(ends, longest)
            positions = packed.positions(len(ids))
            found = together(ids, packed, positions).float()
            as_one = together(ids, Packed(ends[[0, -1]], len(ids)), positions).float()
    except Exception as error:  # families fail in their own ways; all can be padded
        if ran_out(error):  # of the device, and nothing of the family
            raise
        said = (str(error) or type(error).__name__).splitlines()[0]
        return f"the {name} does not read packed texts ({said})"
    finally:
        part.train(was_training)
    most = _TOLERANCE * expected.norm()
    if _computes_in_half(part):
        # Where texts that see each other hardly differ, as with random weights, half of that.
        most = (_TOLERANCE_OF_HALF * expected.norm()).minimum((as_one - expected).norm() / 2)
    if not bool((found - expected).norm() <= most):
        return f"the {name} reads packed texts in another way than each alone"
    return None
