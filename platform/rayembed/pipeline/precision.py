"""The number type of a run that leaves it to the hardware (`model.backbone.dtype=auto`)."""

import logging
from pathlib import Path
from typing import TypeVar

from rayembed.config.adaptation import Adaptation
from rayembed.config.backbone import Dtype
from rayembed.config.document import read_mapping
from rayembed.config.run import Run
from rayembed.config.settings import changed, parse
from rayembed.errors import ConfigError
from rayembed.registry.run_folder import RUN_FILE
from rayembed.training.on_ray import worker_precision

logger = logging.getLogger(__name__)

Trained = TypeVar("Trained", Run, Adaptation)


def as_begun(run: Trained, folder: Path) -> Trained:
    """The run with the number type that its folder's `run.yaml` names, where it leaves it open.

    So that it goes on in that type on another machine; a run that begins stays as it is.
    """
    path = folder / RUN_FILE
    if run.model.backbone.dtype != "auto" or not path.exists():
        return run
    try:
        found = read_mapping(path)["model"]["backbone"]["dtype"]
    except (ConfigError, KeyError, TypeError):
        return run  # `check_run_folder` tells what is wrong with the file
    return run if found not in ("bfloat16", "float32") else _with_dtype(run, found)


def settled_on_ray(run: Trained) -> Trained:
    """The run with the number type that its workers' nodes compute fast, said in one line.

    One that names bfloat16 where these emulate it is warned of, with the measured factor.

    Raises:
        ConfigError: settings that do not go together in that type.
    """
    asked = run.model.backbone.dtype
    if asked == "float32":
        return run
    precision = worker_precision(run.placement)
    if asked == "auto":
        logger.info("model.backbone.dtype auto is %s", precision)
        return _with_dtype(run, precision.dtype)
    if precision.dtype != asked:
        logger.warning(
            "model.backbone.dtype is %s, but %s on the workers' nodes; a new run with auto or "
            "%s is faster",
            *(asked, precision.why, precision.dtype),
        )
    return run


def _with_dtype(run: Trained, dtype: Dtype) -> Trained:
    backbone = changed(run.model.backbone, dtype=dtype)
    return parse(type(run), {**dict(run), "model": changed(run.model, backbone=backbone)})
