"""GradCache: contrastive gradients of a large batch with the memory of one micro-batch (arXiv
2101.06983).

First pass: all micro-batches without graph, their random states recorded. Then the loss and its
gradient with respect to the embeddings. Second pass: each micro-batch again, with the same random
numbers and a graph, and its part of that gradient sent through it.

Beyond the paper it caches what two architectures need: vectors that all micro-batches share
(`context`, from a first encoder, itself in micro-batches) and statistics that add up over the
batch (router loads), so that neither depends on how the batch is cut. And what a loss may have:
parameters of its own.

Where memory allows, the first pass keeps its graphs and the second one is left out.

U texts of one worker, D embedding width, S statistics, C context width, P parameters of the loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from rayembed.distributed.collectives import gather_with_gradient
from rayembed.distributed.random_state import capture, replayed

MicroBatch = dict[str, Tensor]
T = TypeVar("T")


class Output(Protocol):
    """Protocol of a model's forward output for a micro-batch of u texts."""

    @property
    def embeddings(self) -> Tensor:
        """(u, D) embeddings of the texts."""
        ...

    @property
    def statistics(self) -> Tensor | None:
        """(S,) statistics summed over the micro-batch, such as router loads; None if the model has
        none.
        """
        ...


@dataclass(frozen=True)
class ContextPasses:
    """Micro-batches of a first encoder, whose document vectors are context for all micro-batches of
    all workers.
    """

    embed: Callable[[MicroBatch], Tensor]
    micro_batches: Sequence[MicroBatch]
    num_fillers: int
    arrange: Tensor
    """Row order of this worker's documents: index of each in the outputs, however they were
    batched."""
    num_rows: int
    """Documents that each worker contributes: the maximum over workers."""
    order: Tensor
    """(n,) indices of the context in all workers' contributions, `num_rows` each."""

    def gathered(self, outputs: Sequence[Tensor]) -> Tensor:
        """(n, C) context vectors of all workers' documents, equal on all workers."""
        # A worker without documents still takes part: its first output has the right width.
        kept = torch.cat([outputs[0][:0], *outputs[: len(outputs) - self.num_fillers]])
        own = kept[self.arrange]
        missing = own.new_zeros(self.num_rows - len(own), own.shape[1])
        return gather_with_gradient(torch.cat([own, missing]))[self.order]


@dataclass(frozen=True)
class Passes:
    """Micro-batches of one worker's step, and the functions that embed them.

    All workers must have the same number of micro-batches, and of context micro-batches: an
    engine that partitions gradients or parameters communicates in each. Those that only fill up
    stand at the end and are counted by `num_fillers`; their outputs do not reach the loss.
    """

    embed: Callable[[MicroBatch, Tensor | None], Output]
    micro_batches: Sequence[MicroBatch]
    num_fillers: int = 0
    context: ContextPasses | None = None
    loss_parameters: Callable[[], Tensor] | None = None
    """Function that returns the (P,) values of the loss's parameters; None for a loss without any.
    """

    def kept(self, outputs: list[Tensor]) -> Tensor:
        """Concatenate the outputs of all micro-batches except the dummy ones at the end."""
        return torch.cat(outputs[: len(outputs) - self.num_fillers])


LossOf = Callable[..., Tensor]
"""Scalar loss of this worker's embeddings (U, D), its summed statistics (S,) or None, and (P,)
where the loss has parameters."""

Backward = Callable[[Tensor, bool], None]
"""Backpropagates a scalar; the flag marks the step's last call."""


def backward_with_graphs(passes: Passes, loss_of: LossOf, backward: Backward) -> Tensor:
    """Backpropagate through graphs kept from the forward pass, micro-batch by micro-batch, and
    return the detached loss.

    One backward pass through all graphs would add the micro-batches' gradients inside autograd,
    in the weights' number type; `backward` may add them in a wider one.
    """
    return _backward(passes, loss_of, backward, keeps_graphs=True)


def backward_with_cache(passes: Passes, loss_of: LossOf, backward: Backward) -> Tensor:
    """Run each micro-batch forward a second time to backpropagate through it, and return the
    detached loss.
    """
    return _backward(passes, loss_of, backward, keeps_graphs=False)


def _backward(passes: Passes, loss_of: LossOf, backward: Backward, *, keeps_graphs: bool) -> Tensor:
    parts: list[Tensor] = []
    parts_again: list[Callable[[], Tensor]] = []
    shared = None
    if passes.context is not None:
        embed = passes.context.embed
        for batch in passes.context.micro_batches:
            part, again = _run(partial(embed, batch), keeps_graphs=keeps_graphs)
            parts.append(part.detach())
            parts_again.append(again)
        with torch.no_grad():
            shared = passes.context.gathered(parts)
        shared.requires_grad_()
    outputs: list[Output] = []
    outputs_again: list[Callable[[], Output]] = []
    for batch in passes.micro_batches:
        output, once_more = _run(partial(passes.embed, batch, shared), keeps_graphs=keeps_graphs)
        outputs.append(output)
        outputs_again.append(once_more)
    with torch.no_grad():
        embeddings = passes.kept([output.embeddings for output in outputs])
        statistics = _sum_of_statistics(outputs, passes.num_fillers)
        parameters = [] if passes.loss_parameters is None else [passes.loss_parameters()]
    leaves = [embeddings, *parameters, *([] if statistics is None else [statistics])]
    for leaf in leaves:
        leaf.requires_grad_()
    loss = loss_of(embeddings, statistics, *parameters)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    grad_embeddings = _filled(grads[0], embeddings)
    grad_statistics = None if statistics is None else _filled(grads[-1], statistics)
    sizes = [len(output.embeddings) for output in outputs]
    del outputs, output

    start = 0
    for place, once_more in enumerate(outputs_again):
        output = once_more()
        if place >= len(sizes) - passes.num_fillers:
            # Fillers weigh nothing, and all workers run the same hooks.
            surrogate = torch.stack([0.0 * tensor.sum() for tensor in _tensors([output])]).sum()
        else:
            part = grad_embeddings[start : start + sizes[place]]
            surrogate = (output.embeddings * part).sum()
            if grad_statistics is not None and output.statistics is not None:
                surrogate = surrogate + (output.statistics * grad_statistics).sum()
            start += sizes[place]
        if place == 0 and passes.loss_parameters is not None:
            grad_parameters = _filled(grads[1], parameters[0])
            surrogate = surrogate + (passes.loss_parameters() * grad_parameters).sum()
        backward(surrogate, passes.context is None and place == len(sizes) - 1)
    if passes.context is not None and shared is not None:
        grad = _filled(shared.grad, shared)
        _backward_of_context(passes.context, parts, parts_again, grad, backward)
    return loss.detach()


def _backward_of_context(
    context: ContextPasses,
    outputs: Sequence[Tensor],
    outputs_again: Sequence[Callable[[], Tensor]],
    grad: Tensor,
    backward: Backward,
) -> None:
    """Backpropagate through the first encoder, given the gradient of the gathered context
    vectors.
    """
    leaves = [output.detach().requires_grad_() for output in outputs]
    # Through the gather this sums what all workers send back for this worker's rows.
    grads = torch.autograd.grad(context.gathered(leaves), leaves, grad, allow_unused=True)
    for place, (once_more, part) in enumerate(zip(outputs_again, grads, strict=True)):
        vectors = once_more()
        backward((vectors * _filled(part, vectors)).sum(), place == len(leaves) - 1)


def _run(embed: Callable[[], T], *, keeps_graphs: bool) -> tuple[T, Callable[[], T]]:
    """Run a forward pass; return its output, and a function that gives the output with a graph,
    either kept or recomputed.
    """
    if keeps_graphs:
        output = embed()
        return output, lambda: output
    state = capture()

    def again() -> T:
        with replayed(state):
            return embed()

    with torch.no_grad():
        return embed(), again


def _tensors(outputs: Sequence[Output]) -> list[Tensor]:
    """List all output tensors, since ZeRO-3 waits for the gradient of every output on all
    workers.
    """
    pairs = [(output.embeddings, output.statistics) for output in outputs]
    return [tensor for pair in pairs for tensor in pair if tensor is not None]


def _sum_of_statistics(outputs: Sequence[Output], num_fillers: int) -> Tensor | None:
    found = [o.statistics for o in outputs[: len(outputs) - num_fillers]]
    kept = [statistics for statistics in found if statistics is not None]
    return torch.stack(kept).sum(0) if kept else None


def _filled(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad
