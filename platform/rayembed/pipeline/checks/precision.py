"""Choose the number type for `model.backbone.dtype=auto` from the hardware."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rayembed.config.backbone import DtypeSetting
from rayembed.config.document import NamedRun, read_mapping
from rayembed.config.placement import Placement
from rayembed.config.settings import changed, parse
from rayembed.errors import ConfigError
from rayembed.machine.hardware import Precision
from rayembed.registry.run_folder import RUN_FILE

logger = logging.getLogger(__name__)

PrecisionOf = Callable[[Placement], Precision]

AnyRun = TypeVar("AnyRun", bound=NamedRun)


def as_begun(run: AnyRun, folder: Path) -> AnyRun:
    """Replace the number type `auto` by the one in the folder's `run.yaml`, so that a resumed run
    keeps its type.

    So that it goes on in that type on another machine; a run that begins stays as it is.
    """
    path = folder / RUN_FILE
    if run.model.backbone.dtype != "auto" or not path.exists():
        return run
    try:
        found = read_mapping(path)["model"]["backbone"]["dtype"]
    except (ConfigError, KeyError, TypeError):
        return run  # `check_run_folder` tells what is wrong with the file
    return run if found not in ("bfloat16", "float32") else with_dtype(run, found)


def run_settled(run: AnyRun, precision_of: PrecisionOf) -> AnyRun:
    """Replace the number type `auto` by one that the workers' nodes compute fast, and log
    it.

    One that names bfloat16 where these emulate it is warned of, with the measured factor.

    Args:
        precision_of: the runtime's answer for a placement.

    Raises:
        ConfigError: settings that do not go together in that type.
    """
    if run.model.backbone.dtype == "float32":
        return run
    precision = precision_of(run.placement)
    say_dtype(run.model.backbone.dtype, precision)
    return with_dtype(run, precision.dtype)


def say_dtype(asked: DtypeSetting, precision: Precision) -> None:
    """Log the number type chosen for `auto`, or warn that the configured one is slow on the
    workers' nodes.
    """
    if asked == "auto":
        logger.info("model.backbone.dtype=auto: using %s", precision)
    elif precision.dtype != asked:
        logger.warning(
            "model.backbone.dtype is %s, but %s on the workers' nodes; training would be "
            "faster in a new run with model.backbone.dtype=auto or %s",
            *(asked, precision.why, precision.dtype),
        )


def with_dtype(run: AnyRun, dtype: DtypeSetting) -> AnyRun:
    """Replace the number type `auto` by the given one; other number types are kept."""
    if run.model.backbone.dtype != "auto":
        return run
    backbone = changed(run.model.backbone, dtype=dtype)
    return parse(type(run), {**dict(run), "model": changed(run.model, backbone=backbone)})
