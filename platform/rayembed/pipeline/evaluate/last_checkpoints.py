"""Mean of a stage's last checkpoints, one more candidate of the guard."""

import logging
from pathlib import Path

from torch import Tensor

from rayembed.assets.storage import exists, join
from rayembed.config.run import Run
from rayembed.training.checkpoints.checkpoint import (
    Checkpoint,
    checkpoint_on_disk,
    read_position,
)
from rayembed.training.checkpoints.checkpoint_list import CHECKPOINTS, listed_checkpoints
from rayembed.training.checkpoints.export import export
from rayembed.training.checkpoints.weights import write_weights

log = logging.getLogger(__name__)


def can_average(number: int, stage_folder: str) -> bool:
    """Whether a stage has that number of checkpoints, or their mean already; warns if not."""
    there = len(listed_checkpoints(join(stage_folder, CHECKPOINTS)))
    if there >= number or exists(_mean_file(number, stage_folder)):
        return True
    log.warning(
        "evaluation.guard.last_checkpoints is %d, but %r has %d checkpoints: their mean is left "
        "out; lower the stage's checkpoint_every_steps for another run",
        *(number, stage_folder, there),
    )
    return False


def save_mean(number: int, run: Run, stage_folder: str | None, folder: str) -> None:
    """Export the mean of a stage's last checkpoints to a folder in storage, unless it exists.

    θ = Σ θᵢ / k over the last k checkpoints (LAWA, arXiv 2209.14981), in float32. Its weights stay
    in the stage's folder, since a finished run removes its checkpoints.

    Args:
        number: k.
        stage_folder: folder of the stage, in storage.
    """
    assert stage_folder is not None
    weights = _mean_file(number, stage_folder)
    if not exists(weights):
        place = join(stage_folder, CHECKPOINTS)
        names = listed_checkpoints(place)[-number:]
        mean: dict[str, Tensor] = {}
        for name in names:
            with checkpoint_on_disk(join(place, name)) as files:
                _add(mean, files, 1 / number)
        write_weights(weights, mean, {"mean_of": " ".join(names)})
    export(run, weights, folder)


def _add(mean: dict[str, Tensor], checkpoint: Path, share: float) -> None:
    weights = Checkpoint(checkpoint, read_position(str(checkpoint))).weights()
    for name in weights:
        tensor = weights[name].float()
        if name in mean:
            mean[name].add_(tensor, alpha=share)
        else:
            mean[name] = share * tensor


def _mean_file(number: int, stage_folder: str) -> str:
    return join(stage_folder, f"mean-of-{number}.safetensors")
