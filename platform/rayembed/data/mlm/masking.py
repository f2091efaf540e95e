"""Token masking, seeded by seed, step and slot in the global batch.

Independent of workers, micro-batches and earlier draws.
"""

from dataclasses import dataclass

import numpy as np

from rayembed.config.adaptation import MaskingConfig
from rayembed.data.plan.sampling import generator
from rayembed.models.vocabulary import Vocabulary


@dataclass(frozen=True)
class MaskedSequence:
    """A masked sequence and its prediction targets."""

    input_ids: np.ndarray
    """(T,) int32 with masks."""
    places: np.ndarray
    """(n,) int64 masked positions."""
    words: np.ndarray
    """(n,) int32 original tokens at these positions."""


def mask(
    input_ids: np.ndarray,
    masking: MaskingConfig,
    vocabulary: Vocabulary,
    *,
    seed: int,
    step: int,
    slot: int,
) -> MaskedSequence:
    """Mask a sequence (arXiv 1810.04805, section 3.1), differently for each step and slot.

    Each non-special token is selected with `masking.probability`. By the shares of the settings, a
    selected token becomes the mask token, a random word of the vocabulary, or stays.

    Args:
        input_ids: (T,) int32, special tokens included; it stays as it is.
    """
    numbers = generator(seed, "masks", str(step), slot)
    chosen, fate = numbers.random((2, len(input_ids)))
    others = numbers.integers(vocabulary.num_words, size=len(input_ids), dtype=np.int32)
    special = np.isin(input_ids, vocabulary.special_ids)
    places = np.flatnonzero((chosen < masking.probability) & ~special)
    fate = fate[places]
    seen = input_ids.copy()
    hidden = fate < masking.mask_share
    changed = ~hidden & (fate < masking.mask_share + masking.random_share)
    seen[places[hidden]] = vocabulary.mask_id
    seen[places[changed]] = others[places[changed]]
    return MaskedSequence(seen, places, input_ids[places])
