"""One step of masked-language modelling: gradients of the mean loss over all masked tokens.

b sequences of this worker, N masked tokens of the global batch, W workers.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from rayembed.config.train_loop import TrainLoopConfig
from rayembed.data.mlm.batch import MaskedBatch
from rayembed.distributed.collectives import largest, sums_of, world_size
from rayembed.distributed.grad_cache import Backward
from rayembed.errors import DataError
from rayembed.models.contract import to_device
from rayembed.models.micro_batches import cut_by_length, padded_tokens
from rayembed.models.nomic_moe.masked_language import (
    MaskedLanguageModel,
    Predictions,
    collate_masked,
)
from rayembed.training.dropped import without_gradient_unless_finite
from rayembed.training.step import StepReport, StepSettings

PERPLEXITY = "perplexity"
MASKED_ACCURACY = "masked_accuracy"


class MaskedStep:
    """A `run_step` for masked-language modelling.

    Args:
        languages: codes, of which batches have the places.
        pad_id: what fills sequences up.
    """

    def __init__(self, languages: Sequence[str], pad_id: int) -> None:
        self.languages, self.pad_id = languages, pad_id

    def __call__(
        self,
        model: MaskedLanguageModel,
        engine: nn.Module,
        backward: Backward,
        batch: MaskedBatch,
        loop_config: TrainLoopConfig,
        settings: StepSettings,
    ) -> StepReport:
        """Accumulate the gradients of one step in the model's parameters.

        Every masked token of the global batch counts alike, whichever worker and micro-batch it
        is in: each sum of losses is divided by N, and multiplied by W, as engines average over
        workers.

        Raises:
            DataError: no token of the global batch is masked.
        """
        lengths = [len(ids) for ids in batch.input_ids]
        cuts = cut_by_length(lengths, settings.micro_batch_tokens, settings.pass_cost_tokens)
        num_passes = largest(len(cuts), settings.device)
        own = float(sum(len(places) for places in batch.places))
        (masked,) = sums_of([own], settings.device)
        if not masked:
            raise DataError(
                f"no token of step {batch.step} is masked: {loop_config.global_rows} sequences "
                f"with {sum(lengths)} tokens on this worker; raise masking.probability or "
                "training.global_sequences"
            )
        tally = _Tally(len(self.languages), settings.device)
        # Engines that partition communicate in every pass: all workers need the same number.
        for number in range(num_passes):
            cut = cuts[min(number, len(cuts) - 1)]
            micro = collate_masked(
                [batch.input_ids[place] for place in cut],
                [batch.places[place] for place in cut],
                [batch.words[place] for place in cut],
                self.pad_id,
            )
            found: Predictions = engine(to_device(micro, settings.device))
            is_filler = number >= len(cuts)
            share = 0.0 if is_filler else world_size() / masked
            loss = without_gradient_unless_finite(found.losses.sum() * share)
            backward(loss, number == num_passes - 1)
            if not is_filler:
                counts = [len(batch.places[place]) for place in cut]
                tally.add(found, np.repeat(batch.language[cut], counts))
        return self._report(tally, lengths, cuts, num_passes, settings)

    def _report(
        self,
        tally: "_Tally",
        lengths: Sequence[int],
        cuts: Sequence[Sequence[int]],
        num_passes: int,
        settings: StepSettings,
    ) -> StepReport:
        mine = [len(lengths), sum(lengths), padded_tokens(lengths, cuts), *tally.flat()]
        sequences, tokens, padded, *flat = sums_of(mine, settings.device)
        loss, correct, count = torch.tensor(flat, dtype=torch.float64).view(3, -1)
        metrics = {
            "masked_tokens": float(count.sum()),
            MASKED_ACCURACY: float(correct.sum() / count.sum()),
            PERPLEXITY: float(torch.exp(loss.sum() / count.sum())),
        }
        for place, code in enumerate(self.languages):
            if count[place]:
                metrics[f"{MASKED_ACCURACY}/{code}"] = float(correct[place] / count[place])
                metrics[f"{PERPLEXITY}/{code}"] = float(torch.exp(loss[place] / count[place]))
        return StepReport(
            loss=float(loss.sum() / count.sum()),
            texts=int(sequences),
            tokens=int(tokens),
            padded_tokens=int(padded),
            micro_batches=num_passes,
            metrics=metrics,
        )


class _Tally:
    """Float64 sums over this worker's masked tokens by language, without GPU synchronisation."""

    def __init__(self, num_languages: int, device: torch.device) -> None:
        self._sums = torch.zeros(3, num_languages, dtype=torch.float64, device=device)

    def add(self, found: Predictions, language: np.ndarray) -> None:
        """Add a micro-batch.

        Args:
            language: (N,) of each masked token.
        """
        losses = found.losses.detach().double()
        values = torch.stack([losses, found.correct.double(), torch.ones_like(losses)])
        places = torch.from_numpy(language).to(losses.device, non_blocking=True)
        self._sums.index_add_(1, places, values)

    def flat(self) -> list[float]:
        """Loss, correct predictions and tokens of each language, as one tensor."""
        values: list[float] = self._sums.flatten().tolist()
        return values
