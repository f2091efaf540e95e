"""Checkpoints of a run's stages as models, to be merged or scored."""

import re
import tempfile

from rayembed.assets.resolver import resolve
from rayembed.assets.storage import exists, join
from rayembed.config.run import Run
from rayembed.errors import ArtifactError
from rayembed.registry.run_folder import RUN_FILE

_PLACE = re.compile(r"(?P<run>.+)/(?P<stage>[^/]+)/train/(?P<checkpoint>[^/]+)/?")
"""Folder of a checkpoint within its run's."""

_NO_STORAGE = re.compile(r"(?!s3|gs)\w+:/.*")
"""References that name no folder of storage: of the hub, a package, the registry."""


def model_of(reference: str) -> str:
    """The reference of a model; for a checkpoint that of its model, which is exported beside those
    of its run's stages, as `<run>/models/<stage>-<checkpoint>`.

    Raises:
        ArtifactError: the checkpoint is damaged, or lies in no run's folder.
        RayembedError: as `rayembed.training.export.export`.
    """
    from rayembed.training.checkpoint import (
        checkpoint_on_disk,
        checkpoint_weights,
        is_checkpoint,
    )
    from rayembed.training.export import export
    from rayembed.training.weights import write_weights

    place = _PLACE.fullmatch(reference)
    if _NO_STORAGE.match(reference) or not is_checkpoint(reference):
        return reference
    if place is None or not exists(join(place["run"], RUN_FILE)):
        raise ArtifactError(
            f"the checkpoint {reference!r} does not lie where its run has put it, "
            "<run>/<stage>/train/<checkpoint>, so its settings are not known; name it there"
        )
    run = Run.read(resolve(join(place["run"], RUN_FILE)))
    model = join(place["run"], "models", f"{place['stage']}-{place['checkpoint']}")
    with checkpoint_on_disk(reference) as folder, tempfile.TemporaryDirectory() as scratch:
        weights = join(scratch, "weights.safetensors")
        write_weights(weights, checkpoint_weights(folder, run), {"checkpoint": reference})
        export(run, weights, model)
    return model
