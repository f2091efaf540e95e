"""Check quickly, before anything starts, that tracking server, hub models and language-model
endpoints answer.
"""

from collections.abc import Iterable

from rayembed.assets.hub import look_at_hub
from rayembed.config.data import DatasetConfig
from rayembed.config.run import Run
from rayembed.errors import AssetError, ConfigError, TrackingError
from rayembed.pipeline.checks.files import models_of
from rayembed.registry.tracking_uri import check_reachable


def unreachable(run: Run) -> list[str]:
    """List what the run needs over the network and cannot get: it is missing or does not answer
    within seconds.

    A tracking server has `tracking_uri.PROBE_SECONDS`, a model of the hub `hub.LOOK_SECONDS`; those
    of the hub that this machine has in its cache are not asked for.
    """
    found = []
    if run.placement.tracking_uri is not None:
        try:
            check_reachable(run.placement.tracking_uri)
        except TrackingError as error:
            found.append(f"placement.tracking_uri: {error}")
    settings = {reference: setting for setting, reference in models_of(run)}
    for reference, setting in settings.items():
        if reference.startswith("hf://") and "*" not in reference:
            try:
                look_at_hub(reference)
            except AssetError as error:
                found.append(f"{setting} cannot be used: {error}")
    for dataset in run.used_datasets:
        try:
            check_endpoints([dataset], run.placement.storage_path)
        except ConfigError as error:
            found.append(str(error))
    return found


def check_endpoints(datasets: Iterable[DatasetConfig], storage: str) -> None:
    """Check that the endpoints of all language models that write or judge rows of the data sets
    answer.

    Args:
        datasets: of which some may ask one.
        storage: where answers of earlier jobs lie. One that has answered before is not looked for.

    Raises:
        ConfigError: a key is not in the environment, or nothing answers at an address.
    """
    for dataset in datasets:
        at = f"data.datasets.{dataset.name}"
        dataset.source.check_endpoint(f"{at}.source", storage)
        for step in dataset.steps:
            step.check_endpoint(f"{at}.{step.kind}", storage)
