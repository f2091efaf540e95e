"""Checkpoints of a run's stages as models that can be merged."""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rayembed.assets.clients import split_options
from rayembed.assets.resolver import resolve, resolve_model
from rayembed.assets.storage import exists, join
from rayembed.config.run import Run
from rayembed.errors import ArtifactError
from rayembed.registry.run_folder import RUN_FILE

_PLACE = re.compile(r"(?P<run>.+)/(?P<stage>[^/]+)/train/(?P<checkpoint>[^/]+)/?")
"""Folder of a checkpoint within its run's."""

_STORAGE = re.compile(r"(?:s3|gs)://|(?!\w+:)")
"""Beginning of references that may name a folder of storage, unlike those of the hub, of a package
and of the registry.
"""


def models_of(references: Sequence[str]) -> list[str]:
    """References of models; for a checkpoint that of its model, which is exported beside those of
    its run's stages, as `<run>/models/<stage>-<checkpoint>`.

    Raises:
        ArtifactError: a checkpoint is damaged, lies in no run's folder, or is of other settings
            than the run's file tells.
        RayembedError: a model is not there, or as `rayembed.training.export.export`.
    """
    from rayembed.training.checkpoint import is_checkpoint

    found = {one: _STORAGE.match(one) is not None and is_checkpoint(one) for one in references}
    for reference, has_checkpoint in found.items():
        if not has_checkpoint:
            _check_no_removed_checkpoint(reference)
            resolve_model(reference)  # before anything is exported
    return [_exported(one) if found[one] else one for one in references]


def _check_no_removed_checkpoint(reference: str) -> None:
    """Raise where the reference names a checkpoint that went when its run was done."""
    named = _PLACE.fullmatch(reference) if _STORAGE.match(reference) else None
    if named is None or exists(reference) or not exists(join(named["run"], RUN_FILE)):
        return
    raise ArtifactError(
        f"there is no checkpoint {reference!r}: a run that is done keeps its models and weights "
        "alone. Train it with placement.keep_states=true under another --name to merge its "
        f"checkpoints, or name its model, {join(named['run'], 'models', named['stage'])}"
    )


def _exported(checkpoint: str) -> str:
    from rayembed.training.checkpoint import checkpoint_on_disk, checkpoint_weights
    from rayembed.training.export import export
    from rayembed.training.weights import write_weights

    place, options = str(Path(checkpoint).expanduser().absolute()), ""
    if "://" in checkpoint:
        place, options = split_options(checkpoint)
    named = _PLACE.fullmatch(place)
    folder = "" if named is None else named["run"] + options
    if named is None or not exists(join(folder, RUN_FILE)):
        raise ArtifactError(
            f"the checkpoint {checkpoint!r} does not lie where its run has put it, "
            "<run>/<stage>/train/<checkpoint>, so its settings are not known; name it there"
        )
    run = Run.read(resolve(join(folder, RUN_FILE)))
    model = join(folder, "models", f"{named['stage']}-{named['checkpoint']}")
    with (
        checkpoint_on_disk(place + options) as files,
        tempfile.TemporaryDirectory() as scratch,
    ):
        weights = join(scratch, "weights.safetensors")
        write_weights(weights, checkpoint_weights(files, run), {"checkpoint": checkpoint})
        export(run, weights, model)
    return model
