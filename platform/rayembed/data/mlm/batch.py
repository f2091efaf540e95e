"""One worker's input for one step of masked-language modelling."""

from dataclasses import dataclass

import numpy as np

from rayembed.config.adaptation import MaskingConfig
from rayembed.data.mlm.masking import mask
from rayembed.data.mlm.plan import SequencePlan
from rayembed.models.vocabulary import Vocabulary


@dataclass(frozen=True)
class MaskedBatch:
    """One worker's masked slice of a global batch, b sequences."""

    step: int
    input_ids: list[np.ndarray]
    """(b) arrays (T,) int32, with masks as the model sees them."""
    places: list[np.ndarray]
    """(b) arrays (n,) int64 of masked positions."""
    words: list[np.ndarray]
    """(b) arrays (n,) int32 of the original tokens at these positions."""
    language: np.ndarray
    """(b,) int64 numbers of the plan's languages."""


@dataclass(frozen=True)
class MaskedSteps:
    """Builds a worker's batches by step number. Picklable: data workers call it."""

    plan: SequencePlan
    masking: MaskingConfig
    vocabulary: Vocabulary
    seed: int
    worker: int
    num_workers: int

    def __call__(self, step: int) -> MaskedBatch:
        """Batch of a step.

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
