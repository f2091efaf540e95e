"""Packed micro-batches: the tokens of all texts concatenated into one sequence, without
padding.

B texts, T tokens of all of them, H hidden size. A packed batch has in place of `attention_mask` the
entries `cu_seqlens` (B + 1,) int32, `position_ids` (T,) int64, which begin anew in each text, and
`longest` (tokens of the longest text, 0) float32.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Packed(NamedTuple):
    """Start and end offsets of the texts within a packed sequence of tokens."""

    cu_seqlens: Tensor
    """(B + 1,) int32 cumulative lengths, from 0 to T."""
    longest: int
    """Number of tokens of the longest text."""

    @classmethod
    def of(cls, batch: Mapping[str, Tensor], prefix: str = "") -> "Packed | None":
        """Read the text offsets of a packed batch; None for a padded batch.

        Args:
            prefix: before the names of the entries.
        """
        cu_seqlens = batch.get(f"{prefix}cu_seqlens")
        if cu_seqlens is None:
            return None
        return cls(cu_seqlens, len(batch[f"{prefix}longest"]))

    @property
    def firsts(self) -> Tensor:
        """(B,) int64 index of each text's first token."""
        return self.cu_seqlens[:-1].long()

    @property
    def lasts(self) -> Tensor:
        """(B,) int64 index of each text's last token."""
        return self.cu_seqlens[1:].long() - 1

    def of_tokens(self, of_texts: Tensor, num_tokens: int) -> Tensor:
        """Repeat values (B, …) of texts for each of their tokens, (T, …).

        Args:
            num_tokens: T, without which the device would be asked for it.
        """
        lengths = self.cu_seqlens.diff()
        return of_texts.repeat_interleave(lengths, dim=0, output_size=num_tokens)

    def positions(self, num_tokens: int) -> Tensor:
        """(T,) int64 index of each token within its text."""
        places = torch.arange(num_tokens, device=self.cu_seqlens.device)
        return places - self.of_tokens(self.firsts, num_tokens)

    def sums(self, values: Tensor) -> Tensor:
        """Sum values (T, …) over the tokens of each text; (B, …) float32."""
        return torch.segment_reduce(
            values.float(), "sum", offsets=self.cu_seqlens.long(), axis=0, unsafe=True
        )

    def largest(self, values: Tensor) -> Tensor:
        """Take the maximum of values (T, …) over the tokens of each text; (B, …) float32."""
        return torch.segment_reduce(
            values.float(), "max", offsets=self.cu_seqlens.long(), axis=0, unsafe=True
        )

    def for_attention(self) -> dict[str, Any]:
        """Return the text offsets as keyword arguments of a transformers model or of
        `attention.attention`.
        """
        return {
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }


def pack(rows: Sequence[np.ndarray], prefix: str = "") -> dict[str, Tensor]:
    """Compute the entries of a packed batch that mark each text's start, end and positions.

    Args:
        prefix: before the names of the entries.
    """
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    ends = np.concatenate([[0], lengths.cumsum()])
    positions = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
    return {
        f"{prefix}cu_seqlens": torch.from_numpy(ends.astype(np.int32)),
        f"{prefix}position_ids": torch.from_numpy(positions),
        # A number that kernels take as an argument: as a shape it is known without asking a device.
        f"{prefix}longest": torch.empty(int(lengths.max()), 0),
    }


def joined(rows: Sequence[np.ndarray]) -> Tensor:
    """Concatenate the token ids of all texts to (T,) int64."""
    return torch.from_numpy(np.concatenate(rows).astype(np.int64))


def counted_positions(ids: Tensor, positions: Tensor, first: int) -> Tensor:
    """(T,) position ids of packed tokens, in the model family's own numbering.

    RoBERTa and its like count from behind the padding's id, which has no place of its own, also
    where a text spells it out.

    Args:
        ids: (T,) tokens.
        positions: (T,) places of the tokens within their texts.
        first: position of a text's first token, see `backbones.first_position`.
    """
    if not first:
        return positions
    left_out = ids == first - 1
    sums = left_out.cumsum(0)
    starts = torch.arange(len(ids), device=ids.device) - positions
    in_text = sums - (sums - left_out.long())[starts]
    return (first + positions - in_text).masked_fill(left_out, first - 1)


def token_states(
    part: Any, batch: Mapping[str, Tensor], first: int, prefix: str = ""
) -> tuple[Tensor, Tensor | Packed]:
    """Run a transformers model on a micro-batch; return its last hidden states, padded (B, T, H) or
    packed (T, H), with mask or text offsets.

    Args:
        first: position of a text's first token, see `backbones.first_position`.
        prefix: before `ids` and `mask`, and before the names of the entries of `pack`.
    """
    ids = batch[f"{prefix}ids" if prefix else "input_ids"]
    packed = Packed.of(batch, prefix)
    if packed is None:
        mask = batch[f"{prefix}mask" if prefix else "attention_mask"]
        return part(input_ids=ids, attention_mask=mask).last_hidden_state, mask
    positions = counted_positions(ids, batch[f"{prefix}position_ids"], first)
    return packed_states(part, packed, positions, input_ids=ids), packed


def packed_states(
    part: Any,
    packed: Packed,
    positions: Tensor,
    *,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
) -> Tensor:
    """Run a transformers model on packed texts; return its last hidden states (T, H).

    Args:
        positions: (T,) as the model counts them.
        input_ids: (T,); or
        inputs_embeds: (T, H) in place of word vectors.
    """
    given = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    # transformers hands a mask of four dimensions to the attention as it is. Of this one without an
    # element any attention but rayembed's, which does not look at it, would fail.
    mask = positions.new_empty(1, 1, 0, 0, dtype=torch.bool)
    states: Tensor = part(
        **{name: value.unsqueeze(0) for name, value in given.items() if value is not None},
        attention_mask=mask,
        position_ids=positions.unsqueeze(0),
        **packed.for_attention(),
    ).last_hidden_state
    return states.squeeze(0)
