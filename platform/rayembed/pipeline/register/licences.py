"""Look up the known licences of a model's base and of its training data."""

import logging
from pathlib import Path

from huggingface_hub import ModelCard

from rayembed.assets.resolver import resolve
from rayembed.config.data import DatasetConfig
from rayembed.config.named_benchmarks import benchmark_of
from rayembed.config.run import Run
from rayembed.errors import AssetError
from rayembed.recipes.data_recipes import known_datasets
from rayembed.results.files import TaskFacts

_CARD = "README.md"

_logger = logging.getLogger(__name__)


def base_licence(reference: str, folder: Path | None = None) -> str:
    """Licence stated in a base model's card; empty if it has no card or the card states
    none.

    Args:
        reference: of the model; on the hub its card is fetched.
        folder: where the model lies on this machine, with or without a card; None: not looked at.
    """
    if folder is not None and (folder / _CARD).is_file():
        return _stated(folder / _CARD)
    try:
        if reference.startswith("hf://"):
            path, _, revision = reference.partition("@")
            repository = "/".join(path.removeprefix("hf://").split("/")[:2])
            return _stated(resolve(f"hf://{repository}/{_CARD}@{revision.partition('/')[0]}"))
        if "://" not in reference and (Path(reference).expanduser() / _CARD).is_file():
            return _stated(Path(reference).expanduser() / _CARD)
    except AssetError as error:
        _logger.info("cannot read the model card of %s: %s", reference, error)
    return ""


def data_licences(run: Run) -> dict[str, str]:
    """Map names of the run's data sets to their licences, as far as the catalogue knows these."""
    found = {dataset.name: _data_licence(dataset) for dataset in run.data.datasets}
    return {name: licence for name, licence in found.items() if licence}


def _data_licence(dataset: DatasetConfig) -> str:
    for path in dataset.source.paths.values():
        if (benchmark := benchmark_of(path)) is not None:
            return benchmark.licence
    for entry in known_datasets().values():
        # By where rows come from: a run may call a data set as it likes.
        if entry.licence and entry.config.source == dataset.source:
            return entry.licence
    return ""


def _stated(card: Path) -> str:
    try:
        licence = ModelCard.load(card).data.get("license")
    except ValueError as error:
        _logger.info("the card %s cannot be read: %s", card, error)
        return ""
    if isinstance(licence, list):
        return ", ".join(str(one) for one in licence)
    return str(licence or "")


def task_facts(task: str) -> TaskFacts | None:
    """Look up mteb's facts about a task: type, main score, data set; None for an unknown task."""
    import mteb

    try:
        metadata = mteb.get_task(task).metadata
    except KeyError:
        return None
    return TaskFacts(str(metadata.type), str(metadata.main_score), str(metadata.dataset["path"]))
