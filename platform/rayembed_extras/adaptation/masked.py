"""Train masked-language modelling: the objective, the job for each worker, and the export of the
encoder.

b sequences of this worker, N masked tokens of the global batch, W workers.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from rayembed.assets.resolver import resolve_model
from rayembed.config.optimizer import TrainLoopConfig
from rayembed.distributed.collectives import (
    gather,
    largest,
    rank,
    read_together,
    summed,
    world_size,
)
from rayembed.distributed.grad_cache import Backward
from rayembed.errors import DataError, DivergenceError
from rayembed.models.contract import load_trainable_state, moved, pinned, to_device
from rayembed.models.passes.micro_batches import cut_by_length
from rayembed.training.checkpoints.export import upload_model
from rayembed.training.checkpoints.weights import read_weights, weights_digest
from rayembed.training.dropped import without_gradient_unless_finite
from rayembed.training.job import Job
from rayembed.training.memory.graph_room import GraphRoom, Tokens
from rayembed.training.objective import Objective, StepReport, StepSettings
from rayembed.training.trainer import Callback, StageTrainer, StepRecord, Stream
from rayembed_extras.adaptation.batch import MaskedBatch, MaskedSteps
from rayembed_extras.adaptation.encoder import (
    check_adaptable,
    load_masked_language_model,
    save_adapted,
)
from rayembed_extras.adaptation.masked_language import (
    MaskedLanguageModel,
    Predictions,
    collate_masked,
)
from rayembed_extras.adaptation.plan import SequencePlan
from rayembed_extras.adaptation.settings import Adaptation, MaskedTraining, MaskingConfig
from rayembed_extras.adaptation.vocabulary import MaskingVocabulary

PERPLEXITY = "perplexity"
MASKED_ACCURACY = "masked_accuracy"
HELD_OUT = "held_out"

_LISTED = 3
"""Number of non-finite metrics that an error lists."""

_LANGUAGE = "language"
"""Entry of a micro-batch: (n,) int64 number of each masked token's language."""


@dataclass(frozen=True)
class CollatedMasked:
    """One worker's batch as micro-batches on the CPU, in pinned memory if a GPU will read them."""

    step: int
    micro_batches: list[dict[str, Tensor]]
    sizes: list[int]
    """Tokens of each micro-batch, padding included."""
    masked: int
    """Masked tokens."""
    counts: Tensor
    """(3,) float64: sequences, their tokens, and padding tokens."""
    needed: Tensor
    """(1, 3) int64: number of micro-batches, tokens of the largest one, and masked tokens."""


@dataclass(frozen=True)
class MaskedLanguage(Objective):
    """Objective that predicts the original words at masked positions."""

    languages: Sequence[str]
    """Language codes, which batches refer to by index."""
    masking: MaskingConfig
    vocabulary: MaskingVocabulary
    held_out: MaskingConfig | None = None

    def batches(
        self, plan: SequencePlan, model: MaskedLanguageModel, stage: TrainLoopConfig, seed: int
    ) -> MaskedSteps:
        """Return the builder of this worker's share of each batch."""
        return MaskedSteps(
            *(plan, self.masking, self.vocabulary, seed, rank(), world_size()), self.held_out
        )

    def source(self, plan: SequencePlan, step: int) -> str:
        """Describe the languages of a batch, for error messages."""
        _, codes = plan.read(step, plan.slots(0, 1))
        return f"the languages {', '.join(sorted(set(codes)))}"

    def ahead(
        self,
        model: MaskedLanguageModel,
        batch: MaskedBatch,
        stage: TrainLoopConfig,
        settings: StepSettings,
    ) -> CollatedMasked:
        """Collate the batch into micro-batches."""
        return self._collated(batch, settings)

    def run_step(
        self,
        model: MaskedLanguageModel,
        engine: nn.Module,
        backward: Backward,
        batch: MaskedBatch | CollatedMasked,
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
        ready, device = batch, settings.device
        if not isinstance(ready, CollatedMasked):
            ready = self._collated(ready, settings)
        # Engines that partition communicate in every pass: all workers need the same number.
        num_passes, most, masked = _of_all_workers(ready, device)
        if not masked:
            sequences, tokens, _ = ready.counts.tolist()
            raise DataError(
                f"no token of step {ready.step} is masked: the step has {stage.global_rows} "
                f"sequences, {sequences:.0f} of them with {tokens:.0f} tokens on this worker; "
                "raise masking.probability or training.global_sequences"
            )
        counts = moved(ready.counts, device)
        tally = _Tally(len(self.languages), device)
        micro_batches = ready.micro_batches

        def predictions(micro: dict[str, Tensor]) -> Predictions:
            found: Predictions = engine(micro)
            return found

        if isinstance(settings.grad_cache, GraphRoom):
            settings.grad_cache.keeps_graphs(
                lambda: predictions(to_device(micro_batches[0], device)),
                ready.sizes[0],
                Tokens(most, most),
                several=False,
            )
        for number in range(num_passes):
            is_filler = number >= len(micro_batches)
            micro = to_device(micro_batches[-1 if is_filler else number], device)
            found = predictions(micro)
            share = 0.0 if is_filler else world_size() / masked
            loss = without_gradient_unless_finite(found.losses.sum() * share)
            backward(loss, number == num_passes - 1)
            if not is_filler:
                tally.add(found, micro[_LANGUAGE])
        (figures,) = read_together(summed(torch.cat([counts, tally.sums.flatten()])))
        return self._report(figures, num_passes)

    @torch.no_grad()
    def score(
        self, engine: nn.Module, batches: Iterable[MaskedBatch], settings: StepSettings
    ) -> dict[str, float]:
        """Return perplexity and accuracy on masked tokens, in total and by language; every worker
        calls it with its own share of the batches.

        Raises:
            DataError: no token of the batches is masked.
        """
        tally = _Tally(len(self.languages), settings.device)
        for batch in batches:
            ready = self._collated(batch, settings)
            own = len(ready.micro_batches)
            for number in range(largest(own, settings.device)):
                micro = to_device(ready.micro_batches[min(number, own - 1)], settings.device)
                found: Predictions = engine(micro)
                if number < own:
                    tally.add(found, micro[_LANGUAGE])
        (figures,) = read_together(summed(tally.sums))
        loss, correct, count = figures
        if not count.sum():
            raise DataError(
                "no token of the held-out batches is masked, so they have no perplexity; raise "
                "training.held_out.masking.probability or training.held_out.batches"
            )
        return self._metrics(loss, correct, count)

    def _collated(self, batch: MaskedBatch, settings: StepSettings) -> CollatedMasked:
        lengths = [len(ids) for ids in batch.input_ids]
        cuts = cut_by_length(lengths, settings.micro_batch_tokens, settings.pass_cost_tokens)
        ready = pinned if settings.pins else dict

        def micro_batch(cut: Sequence[int]) -> dict[str, Tensor]:
            ids, places, words = (
                [part[place] for place in cut]
                for part in (batch.input_ids, batch.places, batch.words)
            )
            made = collate_masked(ids, places, words, self.vocabulary.pad_id)
            language = np.repeat(batch.language[cut], [len(own) for own in places])
            return ready(made | {_LANGUAGE: torch.from_numpy(language)})

        sizes = [len(cut) * max(lengths[place] for place in cut) for cut in cuts]
        masked = sum(len(places) for places in batch.places)
        counts = torch.tensor([len(lengths), sum(lengths), sum(sizes)], dtype=torch.float64)
        needed = torch.tensor([[len(cuts), max(sizes), masked]])
        return CollatedMasked(
            step=batch.step,
            micro_batches=[micro_batch(cut) for cut in cuts],
            sizes=sizes,
            masked=masked,
            **ready({"counts": counts, "needed": needed}),
        )

    def _report(self, figures: Tensor, num_passes: int) -> StepReport:
        sequences, tokens, padded = figures[:3].tolist()
        loss, correct, count = figures[3:].view(3, -1)
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
        """Compute the metrics over all tokens, and over the tokens of each language that
        occurs.

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


def _of_all_workers(ready: CollatedMasked, device: torch.device) -> tuple[int, int, int]:
    """Return the most micro-batches of any worker, the most tokens of any micro-batch, and the
    masked tokens of all workers.

    One worker knows them; several exchange them over their devices in one message.
    """
    if world_size() == 1:
        return len(ready.micro_batches), max(ready.sizes), ready.masked
    (figures,) = read_together(gather(moved(ready.needed, device)))
    passes, most, masked = figures.T.tolist()
    return max(passes), max(most), sum(masked)


class HeldOutScores(Callback):
    """Callback that adds `held_out/masked_accuracy` and `held_out/perplexity`, also for each
    language, to the log of scored steps. A perplexity that is not finite ends the run.

    Args:
        every_steps: steps between two scores; None: the last step alone.
    """

    def __init__(self, every_steps: int | None) -> None:
        self._every = every_steps

    def on_train_start(self, trainer: StageTrainer, step: int) -> None:
        """Keep the trainer, whose model is scored later."""
        self._trainer = trainer

    def on_step_end(self, record: StepRecord) -> None:
        """Score the held-out batches if this step is one at which they are scored.

        Raises:
            DivergenceError: a perplexity is not finite; the same on all workers.
        """
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
        self._check(found, record)
        record.update({f"{HELD_OUT}/{name}": value for name, value in found.items()})

    def _check(self, found: Mapping[str, float], record: StepRecord) -> None:
        bad = [name for name, value in found.items() if not math.isfinite(value)]
        if bad:
            figures = ", ".join(f"{HELD_OUT}/{name} {found[name]:g}" for name in bad[:_LISTED])
            more = f" and {len(bad) - _LISTED} more" if len(bad) > _LISTED else ""
            raise DivergenceError(
                f"stage {record['stage']!r}: the metrics of the held-out batches after step "
                f"{record['step']} are not finite ({figures}{more}; loss {record['loss']:.4g}, "
                f"learning rate {record['learning_rate']:.3g}): training has diverged. No "
                "checkpoint and no encoder were saved. Most often the learning rate is too "
                "high: lower training.optimizer.learning_rate or raise "
                "training.optimizer.warmup_steps, and adapt under another --name"
            )


class _Tally:
    """Sum losses and correct predictions over this worker's masked tokens by language, in float64,
    without GPU synchronisation.
    """

    def __init__(self, num_languages: int, device: torch.device) -> None:
        self.sums = torch.zeros(3, num_languages, dtype=torch.float64, device=device)
        """(3, languages) losses, correct predictions and tokens."""

    def add(self, found: Predictions, language: Tensor) -> None:
        """Add the losses and correct predictions of a micro-batch.

        Args:
            language: of each masked token.
        """
        losses = found.losses.detach().double()
        values = torch.stack([losses, found.correct.double(), torch.ones_like(losses)])
        self.sums.index_add_(1, language, values)


@dataclass(frozen=True)
class AdaptationJob(Job):
    """Everything that a worker needs to run an adaptation; sent to every worker."""

    run: Adaptation
    plan_folder: str
    weights: str
    number: int = 0

    @property
    def stage(self) -> MaskedTraining:
        """Settings of the training: number of steps, batch size and optimiser."""
        return self.run.training

    @property
    def pretrained(self) -> tuple[str, ...]:
        """Asset reference of the pretrained encoder."""
        return (self.run.model.backbone.path,)

    def plan(self) -> SequencePlan:
        """Open the plan that assigns sequences to the steps."""
        return SequencePlan.open(self.plan_folder)

    def model(self) -> MaskedLanguageModel:
        """Load the pretrained encoder with its prediction head."""
        return load_adapted(self.run, None)

    def objective(self, plan: SequencePlan) -> MaskedLanguage:
        """Build the masked-language objective with the vocabulary of the encoder's tokenizer."""
        run = self.run
        vocabulary = check_adaptable(resolve_model(run.model.backbone.path), run.model)
        held_out = run.training.held_out
        masking = None if held_out is None else held_out.masking
        return MaskedLanguage(plan.languages, run.masking, vocabulary, masking)

    def trainer(self, callbacks: Sequence[Callback], stream: Stream) -> StageTrainer:
        """Build this worker's trainer, with a callback that scores the held-out batches."""
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

    made = json.dumps(made_of, indent=1, sort_keys=True).encode()
    upload_model(folder, made, save, embeds=False)
