"""Check that weights are finite: tensors before they are written, files before they are uploaded or
registered.

One pass over the numbers, without a copy of them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rayembed.assets.sentence_modules import no_pickled_objects
from rayembed.errors import ArtifactError

if TYPE_CHECKING:
    from torch import Tensor


def is_finite(tensor: "Tensor") -> bool:
    """Whether every number of a tensor is finite."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    if tensor.itemsize == 1:  # numbers of 8 bits have no order on CPUs
        tensor = tensor.float()
    lowest, highest = tensor.detach().aminmax()  # what is no number makes both so
    return bool(lowest.isfinite() & highest.isfinite())


def check_finite(tensors: Iterable[tuple[str, "Tensor"]], what: str) -> None:
    """Raise unless every number of the named tensors is finite.

    Args:
        what: the whole that they are of, for the message.

    Raises:
        ArtifactError: one is not; names the first such tensor.
    """
    for name, tensor in tensors:
        if not is_finite(tensor):
            wrong = int((~tensor.float().isfinite()).sum())
            raise ArtifactError(
                f"{what}: {wrong:,} of the {tensor.numel():,} numbers of {name!r} are not finite "
                "(NaN or infinite), so rayembed refuses these unusable weights. Training "
                "diverged, or it started from such weights: lower the learning rate or lengthen "
                "the warm-up, and train again under another --name"
            )


def check_finite_files(folder: Path) -> None:
    """Raise unless every number in the weight files of a model's folder is finite.

    Pickled weights (`.bin`) are read as torch reads weights alone: nothing in them is run.

    Raises:
        ArtifactError: one is not, or a file is damaged.
    """
    import safetensors
    import torch

    for path in sorted(folder.rglob("*.safetensors")):
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                names = file.keys()
                check_finite(((n, file.get_tensor(n)) for n in names), f"the model {str(path)!r}")
        except (OSError, safetensors.SafetensorError) as error:
            raise ArtifactError(f"cannot read the weights {str(path)!r}: {error}") from error
    for path in sorted(folder.rglob("*model*.bin")):
        try:
            with no_pickled_objects(path):
                tensors = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise ArtifactError(f"cannot read the weights {str(path)!r}: {error}") from error
        named = ((n, value) for n, value in tensors.items() if isinstance(value, torch.Tensor))
        check_finite(named, f"the model {str(path)!r}")
