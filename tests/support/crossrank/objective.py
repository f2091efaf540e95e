"""What a cross-encoder is trained for: the relevant one of each row's pairs has the high score."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from crossrank.config import PairCrossEntropy
from crossrank.model import CrossEncoder, PairTokenizer
from rayembed.config.stage import StageConfig
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.distributed.collectives import largest, rank, read_together, summed, world_size
from rayembed.distributed.grad_cache import Backward
from rayembed.errors import ConfigError
from rayembed.models.contract import Tokens, cost, to_device
from rayembed.models.passes.micro_batches import cut_by_length, padded_tokens
from rayembed.training.contrastive.step import EmbeddingObjective
from rayembed.training.objective import StepReport, StepSettings


@dataclass(frozen=True)
class PairBatch:
    """This worker's pairs of a step: of each row the positive, then its negatives."""

    step: int
    tokens: Sequence[Tokens]
    relevant: np.ndarray
    """(P,) float32: 1 for a positive, else 0."""


@dataclass(frozen=True)
class PairBatches:
    """Builds this worker's pairs of a step."""

    plan: BatchPlan
    tokenizer: PairTokenizer
    worker: int
    num_workers: int

    def __call__(self, step: int) -> PairBatch:
        pairs, relevant = [], []
        for record in self.plan.read(step, self.worker, self.num_workers):
            negatives = record.negatives[: self.plan.num_negatives]
            documents = [record.positives[0], *(negative.text for negative in negatives)]
            pairs += [(record.query, document) for document in documents]
            relevant += [1.0, *[0.0] * (len(documents) - 1)]
        return PairBatch(step, self.tokenizer.of_pairs(pairs), np.array(relevant, np.float32))


class Pairs(EmbeddingObjective):
    """Each pair by itself; where batches come from is told as of any pairs."""

    def check(self, stage: StageConfig) -> None:
        """Return when the stage's loss is one of scores."""
        if not isinstance(stage.loss, PairCrossEntropy):
            raise ConfigError(
                f"stages.{stage.name}.loss.kind is {stage.loss.kind!r}; a pair_scorer gives no "
                "embeddings, set it to pair_cross_entropy"
            )

    def batches(
        self, plan: BatchPlan, model: CrossEncoder, stage: StageConfig, seed: int
    ) -> PairBatches:
        """Builder of this worker's share of each batch."""
        return PairBatches(plan, model.tokenizer, rank(), world_size())

    def ahead(
        self, model: CrossEncoder, batch: PairBatch, stage: StageConfig, settings: StepSettings
    ) -> PairBatch:
        """The batch as it is: its step collates it."""
        return batch

    def run_step(
        self,
        model: CrossEncoder,
        engine: nn.Module,
        backward: Backward,
        batch: PairBatch,
        stage: StageConfig,
        settings: StepSettings,
    ) -> StepReport:
        """Accumulate the gradient of this worker's mean loss, one micro-batch after the other."""
        lengths = [cost(tokens) for tokens in batch.tokens]
        cuts = cut_by_length(lengths, settings.micro_batch_tokens, settings.pass_cost_tokens)
        num_passes = largest(len(cuts), settings.device)
        loss: Any = stage.loss
        relevant = torch.from_numpy(batch.relevant).to(settings.device)
        total = 0.0
        for number in range(num_passes):
            places = cuts[min(number, len(cuts) - 1)]
            micro = model.tokenizer.collate([batch.tokens[place] for place in places])
            scores = engine(to_device(micro, settings.device))
            mine = loss.of_scores(scores, relevant[places]).sum() / len(lengths)
            if number >= len(cuts):  # other workers have more; this pass adds nothing
                mine = mine * 0.0
            total += float(mine.detach())
            backward(mine, number == num_passes - 1)
        figures = (total, len(lengths), sum(lengths), padded_tokens(lengths, cuts))
        mine = torch.tensor(figures, dtype=torch.float64, device=settings.device)
        (sums,) = read_together(summed(mine))
        total, texts, tokens, padded = sums.tolist()
        return StepReport(
            loss=total / world_size(),
            texts=int(texts),
            tokens=int(tokens),
            padded_tokens=int(padded),
            micro_batches=num_passes,
            metrics={},
        )


PAIRS = Pairs()
