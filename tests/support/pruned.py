"""Pruned models without a method of pruning: zeros by a draw, and the file that tells of them."""

from pathlib import Path

import torch

from rayembed.models.loading.load import load_model
from rayembed.models.saving.export import read_compression, write_compression


def prune_folder(folder, output, *, share=0.5, instructions=None):
    """The model of a folder with zeros in the matrices of its linear layers, in another folder."""
    model = load_model(folder)
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith("backbone.")
    }
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in linear:
                p[torch.rand(p.shape, generator=generator) < share] = 0.0
    model.save(Path(output), instructions=instructions or {})
    write_compression(Path(output), {"settings": {"kind": "drawn"}, "matrices": sorted(linear)})
    return Path(output)


def moved_zeros(start, state):
    """Number of zeros of a pruned folder's matrices that are none in weights by name, and zeros."""
    weights = load_model(start).state_dict()
    zeros = {name: weights[name] == 0 for name in read_compression(Path(start))["matrices"]}
    moved = sum(int((state[name][mask] != 0).sum()) for name, mask in zeros.items())
    return moved, sum(int(mask.sum()) for mask in zeros.values())
