"""Masked-language modelling: its objective, an adaptation's job, and the exported encoder.

b sequences of this worker, N masked tokens of the global batch, W workers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from rayembed.assets.resolver import resolve_model
from rayembed.config.adaptation import Adaptation, MaskedTraining, MaskingConfig
from rayembed.config.train_loop import TrainLoopConfig
from rayembed.data.mlm.batch import MaskedBatch, MaskedSteps
from rayembed.data.mlm.plan import SequencePlan
from rayembed.distributed.collectives import largest, rank, sums_of, world_size
from rayembed.distributed.grad_cache import Backward
from rayembed.errors import DataError
from rayembed.models.contract import load_trainable_state, to_device
from rayembed.models.micro_batches import cut_by_length, padded_tokens
from rayembed.models.nomic_moe.adaptation import (
    check_adaptable,
    load_masked_language_model,
    save_adapted,
)
from rayembed.models.nomic_moe.masked_language import (
    MaskedLanguageModel,
    Predictions,
    collate_masked,
)
from rayembed.models.vocabulary import Vocabulary
from rayembed.training.dropped import without_gradient_unless_finite
from rayembed.training.export import upload_model
from rayembed.training.graph_room import GraphRoom, Tokens
from rayembed.training.job import Job
from rayembed.training.step import StepReport, StepSettings
from rayembed.training.trainer import Objective
from rayembed.training.weights import read_weights, weights_digest

PERPLEXITY = "perplexity"
MASKED_ACCURACY = "masked_accuracy"


@dataclass(frozen=True)
class MaskedLanguage(Objective):
    """The words that stood where tokens are masked."""

    languages: Sequence[str]
    """Codes, of which batches have the places."""
    masking: MaskingConfig
    vocabulary: Vocabulary

    def batches(
        self, plan: SequencePlan, model: MaskedLanguageModel, stage: TrainLoopConfig, seed: int
    ) -> MaskedSteps:
        """Builder of this worker's share of each batch."""
        return MaskedSteps(plan, self.masking, self.vocabulary, seed, rank(), world_size())

    def source(self, plan: SequencePlan, step: int) -> str:
        """The batch's languages."""
        _, codes = plan.read(step, plan.slots(0, 1))
        return f"the languages {', '.join(sorted(set(codes)))}"

    def run_step(
        self,
        model: MaskedLanguageModel,
        engine: nn.Module,
        backward: Backward,
        batch: MaskedBatch,
        stage: TrainLoopConfig,
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
                f"no token of step {batch.step} is masked: {stage.global_rows} sequences "
                f"with {sum(lengths)} tokens on this worker; raise masking.probability or "
                "training.global_sequences"
            )
        tally = _Tally(len(self.languages), settings.device)

        def predictions(number: int) -> Predictions:
            cut = cuts[number]
            micro = collate_masked(
                [batch.input_ids[place] for place in cut],
                [batch.places[place] for place in cut],
                [batch.words[place] for place in cut],
                self.vocabulary.pad_id,
            )
            found: Predictions = engine(to_device(micro, settings.device))
            return found

        sizes = [len(cut) * max(lengths[place] for place in cut) for cut in cuts]
        most = largest(max(sizes), settings.device)
        if isinstance(settings.grad_cache, GraphRoom):
            first = partial(predictions, 0)
            settings.grad_cache.keeps_graphs(first, sizes[0], Tokens(most, most), several=False)
        # Engines that partition communicate in every pass: all workers need the same number.
        for number in range(num_passes):
            cut = cuts[min(number, len(cuts) - 1)]
            found = predictions(min(number, len(cuts) - 1))
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


@dataclass(frozen=True)
class AdaptationJob(Job):
    """An adaptation, as passed to every worker."""

    run: Adaptation
    plan_folder: str
    weights: str
    number: int = 0

    @property
    def stage(self) -> MaskedTraining:
        """Steps and optimiser of the adaptation."""
        return self.run.training

    @property
    def pretrained(self) -> tuple[str, ...]:
        """Reference of the pretrained encoder."""
        return (self.run.model.backbone.path,)

    def plan(self) -> SequencePlan:
        """The adaptation's plan of sequences."""
        return SequencePlan.open(self.plan_folder)

    def model(self) -> MaskedLanguageModel:
        """The pretrained encoder with its head."""
        return load_adapted(self.run, None)

    def objective(self, plan: SequencePlan) -> MaskedLanguage:
        """Masked-language modelling with the encoder's own words."""
        run = self.run
        vocabulary = check_adaptable(resolve_model(run.model.backbone.path), run.model)
        return MaskedLanguage(plan.languages, run.masking, vocabulary)


def load_adapted(run: Adaptation, weights: str | None) -> MaskedLanguageModel:
    """The run's encoder and head on the CPU with trained weights from storage, or the initial ones.

    Raises:
        RayembedError: the start model or the weights cannot be had or do not fit.
    """
    model = load_masked_language_model(
        resolve_model(run.model.backbone.path),
        run.model,
        max_length=run.corpus.max_length,
        seed=run.seed,
    )
    if weights is not None:
        load_trainable_state(model, read_weights(weights))
    return model


def export_encoder(run: Adaptation, weights: str, folder: str) -> None:
    """Export the adapted encoder to a storage folder, usable as `model.backbone.path` of nomic-moe.

    One that is there whole, of the same run and weights, stays; another is replaced.

    Raises:
        RayembedError: the start model or the weights cannot be had, or the storage refuses it.
    """
    made_of = {"run": run.fingerprint, "weights": weights_digest(weights)}

    def save(place: Path) -> None:
        start = resolve_model(run.model.backbone.path)
        save_adapted(load_adapted(run, weights), place, start, run.model)

    upload_model(folder, json.dumps(made_of, indent=1, sort_keys=True).encode(), save)
