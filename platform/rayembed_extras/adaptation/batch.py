"""Build the masked input that one worker reads in one step of masked-language modelling. Masks
depend on seed, step and slot alone, not on workers, micro-batches or earlier draws.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayembed.data.plan.sampling import generator
from rayembed_extras.adaptation.plan import SequencePlan
from rayembed_extras.adaptation.settings import MaskingConfig
from rayembed_extras.adaptation.vocabulary import MaskingVocabulary


@dataclass(frozen=True)
class MaskedBatch:
    """One worker's share of a global batch: b sequences with masked tokens and their targets."""

    step: int
    input_ids: list[np.ndarray]
    """(b) arrays (T,) int32, with masks as the model sees them."""
    places: list[np.ndarray]
    """(b) arrays (n,) int64 of masked positions."""
    words: list[np.ndarray]
    """(b) arrays (n,) int32 of the original tokens at these positions."""
    language: np.ndarray
    """(b,) int64 index of each sequence's language in the plan."""


@dataclass(frozen=True)
class MaskedSteps:
    """Build a worker's masked batches by step number. Picklable: data workers call it."""

    plan: SequencePlan
    masking: MaskingConfig
    vocabulary: MaskingVocabulary
    seed: int
    worker: int
    num_workers: int
    held_out: MaskingConfig | None = None
    """Masking of held-out batches; their masks do not depend on the number of steps."""

    def __call__(self, step: int) -> MaskedBatch:
        """Read and mask this worker's sequences of a training step, or of a held-out step.

        Raises:
            DataError: the workers cannot share a batch equally.
            ArtifactError: a file of the plan is missing or broken.
        """
        slots = self.plan.slots(self.worker, self.num_workers)
        sequences, codes = self.plan.read(step, slots)
        masking, number_of_draw = self.masking, step
        if step in self.plan.held_out:
            assert self.held_out is not None
            masking, number_of_draw = self.held_out, self.plan.num_steps - step - 1  # below 0
        masked = [
            mask(ids, masking, self.vocabulary, seed=self.seed, step=number_of_draw, slot=slot)
            for ids, slot in zip(sequences, slots, strict=True)
        ]
        languages = self.plan.languages
        language = np.array([languages.index(code) for code in codes], dtype=np.int64)
        input_ids, places, words = (list(of_all) for of_all in zip(*masked, strict=True))
        return MaskedBatch(step, input_ids, places, words, language)


class MaskedSequence(NamedTuple):
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
    vocabulary: MaskingVocabulary,
    *,
    seed: int,
    step: int,
    slot: int,
) -> MaskedSequence:
    """Mask random tokens of a sequence (arXiv 1810.04805, section 3.1), seeded by step and
    slot.

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
