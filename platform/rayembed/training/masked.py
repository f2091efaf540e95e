"""Masked-language modelling: its objective, an adaptation's job, and the exported encoder.

b sequences of this worker, N masked tokens of the global batch, W workers.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

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
from rayembed.training.trainer import Callback, Objective, StageTrainer, StepRecord, Stream
from rayembed.training.weights import read_weights, weights_digest

PERPLEXITY = "perplexity"
MASKED_ACCURACY = "masked_accuracy"
HELD_OUT = "held_out"


@dataclass(frozen=True)
class MaskedLanguage(Objective):
    """The words that stood where tokens are masked."""

    languages: Sequence[str]
    """Codes, of which batches have the places."""
    masking: MaskingConfig
    vocabulary: Vocabulary
    held_out: MaskingConfig | None = None

    def batches(
        self, plan: SequencePlan, model: MaskedLanguageModel, stage: TrainLoopConfig, seed: int
    ) -> MaskedSteps:
        """Builder of this worker's share of each batch."""
        return MaskedSteps(
            *(plan, self.masking, self.vocabulary, seed, rank(), world_size()), self.held_out
        )

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
            return self._predictions(engine, batch, cuts[number], settings)

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
                tally.add(found, batch, cut)
        return self._report(tally, lengths, cuts, num_passes, settings)

    @torch.no_grad()
    def score(
        self, engine: nn.Module, batches: Iterable[MaskedBatch], settings: StepSettings
    ) -> dict[str, float]:
        """Perplexity and share of masked words that are named, over all tokens of the batches and
        of each language; all workers call it, each with its own share of the batches.
        """
        tally = _Tally(len(self.languages), settings.device)
        for batch in batches:
            lengths = [len(ids) for ids in batch.input_ids]
            cuts = cut_by_length(lengths, settings.micro_batch_tokens, settings.pass_cost_tokens)
            for number in range(largest(len(cuts), settings.device)):
                cut = cuts[min(number, len(cuts) - 1)]
                found = self._predictions(engine, batch, cut, settings)
                if number < len(cuts):
                    tally.add(found, batch, cut)
        return self._metrics(*_by_language(sums_of(tally.flat(), settings.device)))

    def _predictions(
        self,
        engine: nn.Module,
        batch: MaskedBatch,
        cut: Sequence[int],
        settings: StepSettings,
    ) -> Predictions:
        micro = collate_masked(
            [batch.input_ids[place] for place in cut],
            [batch.places[place] for place in cut],
            [batch.words[place] for place in cut],
            self.vocabulary.pad_id,
        )
        found: Predictions = engine(to_device(micro, settings.device))
        return found

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
        loss, correct, count = _by_language(flat)
        metrics = {"masked_tokens": float(count.sum()), **self._metrics(loss, correct, count)}
        return StepReport(
            loss=float(loss.sum() / count.sum()),
            texts=int(sequences),
            tokens=int(tokens),
            padded_tokens=int(padded),
            micro_batches=num_passes,
            metrics=metrics,
        )

    def _metrics(self, loss: Tensor, correct: Tensor, count: Tensor) -> dict[str, float]:
        """Metrics over all tokens, and over those of each language that has any.

        Args:
            loss, correct, count: (languages,) sums over masked tokens.
        """
        metrics = {
            MASKED_ACCURACY: float(correct.sum() / count.sum()),
            PERPLEXITY: float(torch.exp(loss.sum() / count.sum())),
        }
        for place, code in enumerate(self.languages):
            if count[place]:
                metrics[f"{MASKED_ACCURACY}/{code}"] = float(correct[place] / count[place])
                metrics[f"{PERPLEXITY}/{code}"] = float(torch.exp(loss[place] / count[place]))
        return metrics


def _by_language(flat: Sequence[float]) -> Tensor:
    """(3, languages) losses, correct predictions and tokens of a tally's flat sums."""
    return torch.tensor(flat, dtype=torch.float64).view(3, -1)


class HeldOutScores(Callback):
    """Adds to the records of due steps what the model makes of the held-out batches, as
    `held_out/masked_accuracy`, `held_out/perplexity` and the same of each language.

    Args:
        every_steps: steps between two scores; None: the last step alone.
    """

    def __init__(self, every_steps: int | None) -> None:
        self._every = every_steps

    def on_train_start(self, trainer: StageTrainer, step: int) -> None:
        """Take note of the trainer."""
        self._trainer = trainer

    def on_step_end(self, record: StepRecord) -> None:
        """Score a due step."""
        trainer, step = self._trainer, record["step"]
        if step < trainer.stage.steps and (self._every is None or step % self._every):
            return
        engine, objective, plan = trainer.engine, trainer.objective, trainer.plan
        assert isinstance(objective, MaskedLanguage)
        assert isinstance(engine.model, MaskedLanguageModel)
        make = objective.batches(plan, engine.model, trainer.stage, trainer.seed)
        engine.model.eval()
        found = objective.score(engine.forward, map(make, plan.held_out), trainer.settings)
        engine.model.train()
        record.update({f"{HELD_OUT}/{name}": value for name, value in found.items()})


class _Tally:
    """Float64 sums over this worker's masked tokens by language, without GPU synchronisation."""

    def __init__(self, num_languages: int, device: torch.device) -> None:
        self._sums = torch.zeros(3, num_languages, dtype=torch.float64, device=device)

    def add(self, found: Predictions, batch: MaskedBatch, cut: Sequence[int]) -> None:
        """Add the predictions of a micro-batch, the sequences `cut` of a batch."""
        language = np.repeat(batch.language[cut], [len(batch.places[place]) for place in cut])
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
        held_out = run.training.held_out
        masking = None if held_out is None else held_out.masking
        return MaskedLanguage(plan.languages, run.masking, vocabulary, masking)

    def trainer(self, callbacks: Sequence[Callback], stream: Stream) -> StageTrainer:
        """Trainer of this worker, which scores what is held out."""
        held_out = self.run.training.held_out
        scores = [] if held_out is None else [HeldOutScores(held_out.every_steps)]
        return super().trainer([*scores, *callbacks], stream)


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
