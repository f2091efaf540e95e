"""Keep pruned weights exactly zero during training.

Their gradients are set to zero before they are added up, so that neither the norm nor a moment
knows of them: training is that of the other weights alone. What the optimiser made of them is set
back to zero after each step, for an update may mix a matrix's elements (Muon).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rayembed.distributed.collectives import rank
from rayembed.models.contract import TrainableModel


class KeptZeros:
    """Masks of the weights on this worker that must stay zero, with the method that resets
    them.

    Args:
        model: before an engine takes its parameters.
        own: gives this worker's part of a whole value of a parameter, see `SpreadExperts.own`.
    """

    def __init__(
        self, model: TrainableModel, own: Callable[[nn.Parameter, Tensor], Tensor]
    ) -> None:
        self._zeros: dict[nn.Parameter, Tensor] = {}
        for name, p in model.named_parameters():
            if p.requires_grad and name in model.kept_zeros:
                zeros = own(p, model.kept_zeros[name]).to(p.device)
                self._zeros[p] = zeros
                p.register_hook(partial(_without, zeros))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def restore(
        self,
        zero_stage: int,
        masters: dict[nn.Parameter, Tensor],
        local_master: Callable[[nn.Parameter], Tensor],
    ) -> None:
        """Reset pruned weights to zero after an update, in the model and in the optimiser's copy.

        Args:
            masters: tensor that is updated for each parameter; of stage 0.
            local_master: gives this worker's share of it; of stage 3.
        """
        for p, zeros in self._zeros.items():
            for weight, part in _weights(p, zeros, zero_stage, masters, local_master):
                weight.masked_fill_(part, 0.0)


def _without(zeros: Tensor, gradient: Tensor) -> Tensor:
    return gradient.masked_fill(zeros, 0.0)


def _weights(
    p: Any,
    zeros: Tensor,
    zero_stage: int,
    masters: dict[nn.Parameter, Tensor],
    local_master: Callable[[nn.Parameter], Tensor],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this worker's tensors that contain a parameter's values, or a part of them, each with
    its mask.
    """
    if zero_stage < 3 or p.numel() == zeros.numel():  # stage 3 frees all but small ones
        yield p.data, zeros
    if not zero_stage:
        yield masters[p], zeros
    elif zero_stage < 3:
        if p._hp_mapping is not None:  # what of it lies in this worker's partition
            place = p._hp_mapping.lp_fragment_address
            part = zeros.flatten().narrow(0, place.start, place.numel)
            yield p._hp_mapping.get_hp_fragment(), part
    else:
        share = p.ds_tensor.numel()
        mine = zeros.flatten()[rank() * share : (rank() + 1) * share]
        mine = nn.functional.pad(mine, (0, share - mine.numel()))
        yield p.ds_tensor.data, mine
        yield local_master(p).view(-1), mine
