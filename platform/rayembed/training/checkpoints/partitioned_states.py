"""Gather each parameter's optimiser state (ZeRO 1 and 2) on the worker that holds most of it, to be
saved there.

DeepSpeed's own getters all-reduce every state of every parameter in fp32, zeros for the most part.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rayembed.distributed.collectives import gather, rank
from rayembed.optim.orthogonal import Fragment


def states_by_owner(
    trained: Sequence[tuple[str, nn.Parameter]], names: Mapping[nn.Parameter, Sequence[str]]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield name and full fp32 state of each parameter that this worker writes; all workers must
    call it together.

    The worker whose partition holds most of a parameter writes it, of equals the first one. A
    parameter that lies in one partition is not sent at all.

    Args:
        trained: parameters with DeepSpeed's notes of their fragments, whose states are linked.
        names: parameter → names of its states; `weight` is added.
    """
    parts = _parts([parameter for _, parameter in trained])
    for (name, parameter), counts in zip(trained, parts, strict=True):
        writer = counts.index(max(counts))
        is_shared = sum(count > 0 for count in counts) > 1
        if not is_shared and writer != rank():
            continue
        state: dict[str, Tensor] = {}
        for key in ("weight", *names[parameter]):
            own = _own_fragment(parameter, None if key == "weight" else key)
            if is_shared:
                own = _in_place(parameter, own)
                dist.reduce(own, writer)
            assert own is not None  # of a partition that has all of the parameter
            state[key] = own
        if writer == rank():
            yield name, {key: value.view(parameter.shape) for key, value in state.items()}


def _parts(parameters: Sequence[nn.Parameter]) -> list[list[int]]:
    """Count the elements of each parameter in each worker's partition."""
    device = parameters[0].device if parameters else "cpu"
    mine = torch.tensor([_held(p) for p in parameters], dtype=torch.int64, device=device)
    found: list[list[int]] = gather(mine.unsqueeze(0)).T.tolist()
    return found


def _held(parameter: nn.Parameter) -> int:
    note = parameter._hp_mapping  # type: ignore[attr-defined] # set by DeepSpeed
    return 0 if note is None else int(note.lp_fragment_address.numel)


def _own_fragment(parameter: nn.Parameter, key: str | None) -> Tensor | None:
    """Return this worker's part of a parameter's state, flat; None if none of it is in this
    worker's partition. Without a key of the weight.
    """
    note = parameter._hp_mapping  # type: ignore[attr-defined] # set by DeepSpeed
    if note is None:
        return None
    fragment: Tensor = note.get_hp_fragment(key)
    return fragment.detach()


def _in_place(parameter: nn.Parameter, own: Tensor | None) -> Tensor:
    """Copy this worker's part to its offset in a full-size flat tensor of zeros."""
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if own is not None:
        start = parameter._hp_mapping.lp_fragment_address.start  # type: ignore[attr-defined]
        whole[start : start + own.numel()] = own
    return whole


def fragments(optimizer: Any) -> dict[Tensor, list[Fragment]]:
    """Map each flat parameter group to the parts of parameters that are in this worker's partition
    (ZeRO 1 and 2).

    Args:
        optimizer: DeepSpeed's own.
    """
    groups = zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True)
    return {
        flat: [_fragment(p) for p in parameters if p._hp_mapping is not None]
        for parameters, flat in groups
    }


def _fragment(parameter: Any) -> Fragment:
    """Read from DeepSpeed's mapping which part of a parameter is in this worker's partition."""
    part = parameter._hp_mapping
    of_parameter, of_partition = part.lp_fragment_address, part.hp_fragment_address
    return Fragment(
        parameter.shape, of_parameter.start, of_parameter.numel, place=of_partition.start
    )
