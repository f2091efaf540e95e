"""Training objective of cross-encoders: the lists of each row, scored in micro-batches of pairs.

A list is a row's positive and its hard negatives. Lists belong to one worker, so nothing is
gathered; a step's loss is the mean over this worker's lists, and engines average over workers. The
loss needs all scores of a list: as in GradCache, its gradient with respect to the scores is sent
through one micro-batch after the other, whose graphs are kept where they fit.

L lists of this worker, M documents of the longest, P pairs.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayembed.config.stage import StageConfig
from rayembed.data.plan.batch_plan import TRAINING, BatchPlan
from rayembed.data.plan.teacher_scores import teacher_scores
from rayembed.data.records import Record
from rayembed.distributed.collectives import maxima, rank, read_together, summed, world_size
from rayembed.distributed.grad_cache import (
    Backward,
    Passes,
    backward_with_cache,
    backward_with_graphs,
)
from rayembed.errors import ConfigError, DataError
from rayembed.models.contract import EmbedOutput, Tokens, cost, moved, pinned, to_device
from rayembed.models.passes.micro_batches import cut_by_length, padded_tokens, places_in_row_order
from rayembed.training.contrastive.step import CONTRASTIVE, keeps_graphs
from rayembed.training.dropped import without_gradient_unless_finite
from rayembed.training.memory.graph_room import Tokens as PaddedTokens
from rayembed.training.objective import Objective, StepReport, StepSettings
from rayembed_extras.reranking.architecture import CrossEncoderModel
from rayembed_extras.reranking.losses.contract import ListLoss, ScoredLists
from rayembed_extras.reranking.tokens import PairTokenizer, cut_share

logger = logging.getLogger(__name__)

_NO_PAIR = -1
"""Index of a document that a list does not have."""


@dataclass(frozen=True)
class ListBatch:
    """Lists of this worker in one step."""

    step: int
    tokens: Sequence[Tokens]
    """Tokens of the P pairs."""
    pairs: np.ndarray
    """(L, M) int64 index of each document's pair, the positive first; -1 where a list ends."""
    teacher: np.ndarray
    """(L, M) float32 scores that mining stored; NaN where there is none."""


@dataclass(frozen=True)
class ListSteps:
    """Builds this worker's lists of a step. Picklable."""

    plan: BatchPlan
    tokenizer: PairTokenizer
    max_length: int | None
    """Tokens of a pair in this stage; None: the model's."""
    worker: int
    num_workers: int

    def __call__(self, step: int) -> ListBatch:
        """Build the lists of a step, counted from 0.

        Raises:
            DataError: a stored score is not finite, or workers cannot share a batch equally.
            ArtifactError: a file of the plan is missing or broken.
        """
        records = self.plan.read(step, self.worker, self.num_workers, TRAINING)
        negatives = self.plan.num_negatives
        return make_list_batch(step, records, negatives, self.tokenizer, self.max_length)


def make_list_batch(
    step: int,
    records: Sequence[Record],
    num_negatives: int,
    tokenizer: PairTokenizer,
    max_length: int | None = None,
) -> ListBatch:
    """Build the lists of records: of each the first positive and the first `num_negatives`
    negatives.

    Args:
        max_length: tokens of a pair; None: the model's.

    Raises:
        DataError: a stored score is not finite.
    """
    shape = len(records), 1 + num_negatives
    pairs, teacher = np.full(shape, _NO_PAIR, np.int64), np.full(shape, np.nan, np.float32)
    texts: list[tuple[str, str]] = []
    for row, record in enumerate(records):
        documents = [record.positives[0], *(n.text for n in record.negatives[:num_negatives])]
        pairs[row, : len(documents)] = range(len(texts), len(texts) + len(documents))
        teacher[row, : len(documents)] = _scores_of(record)[: len(documents)]
        texts += [(record.query, document) for document in documents]
    return ListBatch(step, tokenizer.of_pairs(texts, max_length), pairs, teacher)


def _scores_of(record: Record) -> list[float]:
    positive, negatives = teacher_scores(record)
    scores = [np.nan if score is None else score for score in (positive, *negatives)]
    if any(score is not None and not np.isfinite(score) for score in (positive, *negatives)):
        raise DataError(
            f"record {record.id!r} of {record.dataset!r} has the stored scores {scores}, of which "
            "some are not finite; mine its data set again, or remove the row"
        )
    return scores


@dataclass(frozen=True)
class CollatedLists:
    """Lists with their micro-batches on the CPU, in pinned memory if they go to a GPU."""

    step: int
    micro_batches: list[dict[str, Tensor]]
    filler: dict[str, Tensor]
    """A micro-batch of one pair, for a worker that has fewer micro-batches than others."""
    lists: dict[str, Tensor]
    """`places` (L, M): index of each document in the outputs of the micro-batches, 0 where a list
    ends; `there` and `teacher` as in `ScoredLists`."""
    counts: Tensor
    """(4,) float64: pairs, their tokens, tokens with padding, pairs that were cut."""
    needed: Tensor
    """(3,) int64: passes, padded tokens of all, padded tokens of the largest."""


def collated(batch: ListBatch, settings: StepSettings, model: CrossEncoderModel) -> CollatedLists:
    """Cut a step's pairs into micro-batches of similar length, and collate these."""
    lengths = [cost(tokens) for tokens in batch.tokens]
    cuts = cut_by_length(lengths, settings.micro_batch_tokens, settings.pass_cost_tokens)

    def held(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return pinned(tensors) if settings.pins else tensors

    def micro_batch(cut: Sequence[int]) -> dict[str, Tensor]:
        return held(model.tokenizer.collate([batch.tokens[place] for place in cut]))

    micro_batches = [micro_batch(cut) for cut in cuts]
    sizes = [one["input_ids"].numel() for one in micro_batches]
    pairs = torch.from_numpy(batch.pairs)
    there = pairs != _NO_PAIR
    places = places_in_row_order(cuts)[pairs.clamp(min=0)].masked_fill(~there, 0)
    lists = {"places": places, "there": there, "teacher": torch.from_numpy(batch.teacher)}
    cut = sum(int(tokens["cut"][0]) > 0 for tokens in batch.tokens)
    counts = [len(lengths), sum(lengths), padded_tokens(lengths, cuts), cut]
    return CollatedLists(
        step=batch.step,
        micro_batches=micro_batches,
        filler=micro_batch([cuts[-1][-1]]),
        lists=held(lists),
        counts=torch.tensor(counts, dtype=torch.float64),
        needed=torch.tensor([len(cuts), sum(sizes), max(sizes)]),
    )


class Lists(Objective):
    """Objective of cross-encoders; the stage chooses the loss over a list's scores."""

    trace = CONTRASTIVE.trace

    def check(self, stage: StageConfig) -> None:
        """Check that the stage's loss is one over lists, and that all its settings have an effect.

        Raises:
            ConfigError: it is not, or one has none.
        """
        of = f"stages.{stage.name}"
        if not isinstance(stage.loss, ListLoss):
            raise ConfigError(
                f"{of}.loss.kind is {stage.loss.kind!r}, which compares vectors, but a "
                "cross-encoder gives scores; use a loss over lists of scores, such as "
                "listwise_softmax"
            )
        if stage.batch.in_batch_negatives:
            raise ConfigError(
                f"{of}.batch.in_batch_negatives has no effect: a cross-encoder scores the pairs "
                "of a row and no others; set it to false, and batch.num_negatives to the "
                "negatives of a list"
            )
        for name, given in (
            ("loss.dimensions", bool(stage.loss.dimensions)),
            ("loss.precisions", bool(stage.loss.precisions)),
            ("hidden_states", stage.hidden_states is not None),
            ("query_max_length", stage.query_max_length is not None),
        ):
            if given:
                raise ConfigError(
                    f"{of}.{name} has no effect, because a cross-encoder gives one score for a "
                    "pair and no vectors; leave it out"
                )

    def batches(
        self, plan: BatchPlan, model: CrossEncoderModel, stage: StageConfig, seed: int
    ) -> ListSteps:
        """Return the builder of this worker's lists; log the share of pairs that are cut."""
        steps = ListSteps(plan, model.tokenizer, stage.document_max_length, rank(), world_size())
        if not rank():
            _tell_of_cut_pairs(stage, steps(0), model)
        return steps

    def ahead(
        self, model: CrossEncoderModel, batch: ListBatch, stage: StageConfig, settings: StepSettings
    ) -> CollatedLists:
        """Collate a step's lists while the step before computes."""
        return collated(batch, settings, model)

    def run_step(
        self,
        model: CrossEncoderModel,
        engine: nn.Module,
        backward: Backward,
        batch: ListBatch | CollatedLists,
        stage: StageConfig,
        settings: StepSettings,
    ) -> StepReport:
        """Compute the loss of this worker's lists, and accumulate its gradients."""
        ready = batch if isinstance(batch, CollatedLists) else collated(batch, settings, model)
        device = settings.device
        # Engines that partition communicate in every pass: all workers need the same number.
        needed = ready.needed
        if world_size() > 1:
            (needed,) = read_together(maxima(moved(needed, device)))
        num_passes, of_step, of_pass = needed.tolist()
        fillers = num_passes - len(ready.micro_batches)
        lists = to_device(ready.lists, device)
        loss: Any = stage.loss

        def embed(micro: dict[str, Tensor], context: Tensor | None) -> EmbedOutput:
            output: EmbedOutput = engine(to_device(micro, device), context)
            return output

        def loss_of(scores: Tensor, statistics: Tensor | None) -> Tensor:
            scored = scored_lists(scores.squeeze(1), lists)
            return without_gradient_unless_finite(loss.of_lists(scored).mean())

        passes = Passes(
            embed=embed,
            micro_batches=ready.micro_batches + [ready.filler] * fillers,
            num_fillers=fillers,
        )
        keeps = keeps_graphs(
            settings.grad_cache, passes, PaddedTokens(of_step, of_pass), several=num_passes > 1
        )
        method = backward_with_graphs if keeps else backward_with_cache
        value = method(passes, loss_of, backward)
        mine = torch.cat([value.detach().double().view(1), moved(ready.counts, device)])
        (sums,) = read_together(summed(mine))
        total, pairs, tokens, padded, cut = sums.tolist()
        return StepReport(
            loss=total / world_size(),
            texts=int(pairs),
            tokens=int(tokens),
            padded_tokens=int(padded),
            micro_batches=num_passes,
            metrics={"cut_share": cut / pairs},
        )

    def source(self, plan: BatchPlan, step: int) -> str:
        """Name the data sets that a step's lists come from, for messages."""
        return CONTRASTIVE.source(plan, step)


def _tell_of_cut_pairs(stage: StageConfig, batch: ListBatch, model: CrossEncoderModel) -> None:
    """Log the share of the first step's pairs that are longer than the model reads, if any are."""
    if share := cut_share(batch.tokens):
        length = stage.document_max_length or model.config.document_max_length
        logger.warning(
            "stage %s: %.0f %% of the first step's pairs are longer than %d tokens, and their "
            "longer text is cut; model.document_max_length sets the length",
            *(stage.name, 100 * share, length),
        )


def scored_lists(scores: Tensor, lists: dict[str, Tensor]) -> ScoredLists:
    """Arrange the scores (P,) of all pairs as lists; the positive stands first.

    Args:
        lists: as in `CollatedLists`.
    """
    there = lists["there"]
    relevant = torch.zeros_like(there)
    relevant[:, 0] = True
    of_lists = scores[lists["places"]].masked_fill(~there, 0.0)
    return ScoredLists(of_lists, relevant, there, lists["teacher"])


LISTS = Lists()
