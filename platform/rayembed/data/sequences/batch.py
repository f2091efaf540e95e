"""What one worker gets for one step of masked-language modelling."""

from dataclasses import dataclass

import numpy as np

from rayembed.config.adaptation import MaskingConfig
from rayembed.data.sequences.masking import mask
from rayembed.data.sequences.plan import SequencePlan
from rayembed.models.masked_language_tokens import Vocabulary


@dataclass(frozen=True)
class MaskedBatch:
    """One worker's slice of a global batch of b sequences, masked."""

    step: int
    input_ids: list[np.ndarray]
    """(b) of (T,) int32: as the model sees them."""
    places: list[np.ndarray]
    """(b) of (n,) int64 places of the masked tokens."""
    words: list[np.ndarray]
    """(b) of (n,) int32: what stood there."""
    language: np.ndarray
    """(b,) int64 places among the plan's languages."""


@dataclass(frozen=True)
class MaskedSteps:
    """Makes a worker's batches by their step. Picklable: data workers call it."""

    plan: SequencePlan
    masking: MaskingConfig
    vocabulary: Vocabulary
    seed: int
    worker: int
    num_workers: int

    def __call__(self, step: int) -> MaskedBatch:
        """The batch of a step.

        Raises:
            DataError: the workers cannot share a batch equally.
            ArtifactError: a file of the plan is missing or broken.
        """
        slots = self.plan.slots(self.worker, self.num_workers)
        sequences, codes = self.plan.read(step, slots)
        masked = [
            mask(ids, self.masking, self.vocabulary, seed=self.seed, step=step, slot=slot)
            for ids, slot in zip(sequences, slots, strict=True)
        ]
        number = {code: place for place, code in enumerate(self.plan.languages)}
        return MaskedBatch(
            step=step,
            input_ids=[one.input_ids for one in masked],
            places=[one.places for one in masked],
            words=[one.words for one in masked],
            language=np.array([number[code] for code in codes], dtype=np.int64),
        )
