"""Saved models with weights that are not finite, or whose vectors are not."""

import math

import safetensors.torch
from tiny_folders import save_tiny

from rayembed.assets.finite import check_finite_files


def model_with_a_nan(folder):
    """A saved model of which one number was made NaN on disk."""
    save_tiny("nvembed", folder)  # whose module is ours
    path = max(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    tensors = safetensors.torch.load_file(path)
    name = next(n for n, t in tensors.items() if "layer" in n and t.ndim == 2)
    tensors[name].view(-1)[3] = math.nan
    path.unlink()  # its content may be shared with other tests
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    return folder


def model_that_overflows(folder):
    """A saved model of which the head's finite weights were made large on disk."""
    path = save_tiny("nvembed", folder) / "pooling.safetensors"
    large = {name: value * 1e25 for name, value in safetensors.torch.load_file(path).items()}
    path.unlink()  # its content may be shared with other tests
    safetensors.torch.save_file(large, path)
    check_finite_files(folder)
    return folder
