"""Pipelined inference over tokenised texts: collation and copying of results overlap with
computation on the GPU.

B texts of a micro-batch, D width of what comes out.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from rayembed.machine.ahead import done_ahead
from rayembed.machine.hardware import pass_cost_tokens, ran_out
from rayembed.models.attention.unpadded import packs
from rayembed.models.contract import EmbeddingModel, Tokens, pinned, to_device
from rayembed.models.passes.fitting import fewer_tokens, first_line, fitting_tokens
from rayembed.models.passes.micro_batches import cut_by_length, padded_tokens, ways_to_collate

_CPU_READY, _GPU_READY = 0, 4
"""Micro-batches that are collated before the device asks for them. A thread beside a CPU takes from
the passes what it gains (benchmarks/log)."""

Collate = Callable[[Sequence[Tokens]], dict[str, Tensor]]


def passes(
    model: EmbeddingModel,
    tokens: Sequence[Tokens],
    lengths: Sequence[int],
    budget: int,
    embed: Callable[[dict[str, Tensor]], Tensor],
    *,
    collate: Sequence[Collate] = (),
) -> Iterator[tuple[list[int], Tensor]]:
    """Run `embed` on micro-batches of the texts; yield the indices of each one's texts with their
    (B, D) float32 CPU vectors.

    Texts are cut into micro-batches by their lengths; for a GPU a thread collates the next ones in
    order, a bounded number ahead, and what it raises is raised here in its turn. Where a GPU's
    memory runs out, this and later calls for the model go on with half the tokens.

    Args:
        lengths: tokens of each text.
        budget: tokens of a micro-batch, padding included.
        embed: takes a micro-batch on the model's device.
        collate: how texts are padded, and how packed; none: as the model's tokenizer does.

    Raises:
        DeviceMemoryError: memory has no room for a single text.
    """
    device = model.device
    # Asked here: the thread is not in the autocast in which the model is tried.
    packed = packs(model)
    way = (collate or ways_to_collate(model.tokenizer))[packed]
    pass_cost = pass_cost_tokens(device.type, model)

    def cut(left: Sequence[int]) -> list[list[int]]:
        budget_now, own = fitting_tokens(model, budget), [lengths[place] for place in left]
        cuts = cut_by_length(own, budget_now, pass_cost, packed=packed)
        return [[left[i] for i in one] for one in cuts]

    def ready(chosen: list[int]) -> tuple[list[int], dict[str, Tensor]]:
        batch = way([tokens[place] for place in chosen])
        return chosen, pinned(batch) if device.type == "cuda" else batch

    before: tuple[list[int], Callable[[], Tensor]] | None = None
    number = _CPU_READY if device.type == "cpu" else _GPU_READY
    left: Sequence[int] = range(len(tokens))
    while left:
        done, cuts, full = 0, cut(left), ""
        with closing(ahead(ready, cuts, number)) as batches:
            for chosen, batch in batches:
                try:
                    made = _copied(embed(to_device(batch, device)).float())
                except RuntimeError as error:
                    if not ran_out(error):
                        raise
                    full = first_line(error)
                    break
                done += 1
                if before is not None:
                    yield before[0], before[1]()
                before = chosen, made
        if full:
            own = [cuts[done]]
            fewer_tokens(model, len(own[0]), padded_tokens(lengths, own, packed=packed), full)
        left = [place for one in cuts[done:] for place in one]
    if before is not None:
        yield before[0], before[1]()


def ahead(work: Callable[[Any], Any], items: Sequence[Any], read_ahead: int) -> Generator[Any]:
    """Yield the results of `work` on each item, computed in advance by a thread if there are
    several items and `read_ahead` is not 0.
    """
    if read_ahead and len(items) > 1:
        yield from done_ahead(work, items, read_ahead=read_ahead)
    else:
        yield from map(work, items)


def _copied(made: Tensor) -> Callable[[], Tensor]:
    """Start copying a tensor to the CPU; return a function that waits for this copy alone and
    returns it.
    """
    if made.device.type != "cuda":
        return made.cpu
    copy = made.to("cpu", non_blocking=True)
    there: Any = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's own
    there.record()

    def wait() -> Tensor:
        there.synchronize()
        return copy

    return wait
