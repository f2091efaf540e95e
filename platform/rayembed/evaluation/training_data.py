"""Training data of a model by the names of mteb's tasks, for mteb's metadata of the model.

mteb is imported where it is needed: workers, which only embed, would wait for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard

from rayembed.config.data import DatasetConfig
from rayembed.config.run import Run
from rayembed.config.types import SHORT_NAMES
from rayembed.registry.model_card import CARD_FILE, hub_dataset, hub_name

_MTEB_SOURCE = "mteb"
"""Kind of the source that reads splits of mteb's tasks."""
_OF_SHORT_NAMES = "sentence-transformers"
"""Organisation on the hub of the models that have short names."""


@dataclass(frozen=True)
class TrainingData:
    """What a model was trained on."""

    tasks: tuple[str, ...] | None = None
    """mteb's tasks whose data were trained on, apart from the base model's; None: not known."""
    base: str | None = None
    """Name on the hub of the model that training began with; its data count, too."""


UNKNOWN = TrainingData()


def training_data_of(run: Run, *, is_trained: bool) -> TrainingData:
    """Training data of a run's models.

    Args:
        is_trained: whether the model was trained by the run; false: it is the run's start.
    """
    data = run.used_datasets if is_trained else []
    return TrainingData(_together(map(_tasks_of, data)), name_on_hub(run.model.backbone.path))


def training_data(reference: str, folder: Path) -> TrainingData:
    """Training data of a saved model: what its card by rayembed says, or mteb knows of its name."""
    if (folder / CARD_FILE).is_file():
        stated = ModelCard.load(folder / CARD_FILE, ignore_metadata_errors=True).data
        if "rayembed" in (stated.tags or []):
            bases = [stated.base_model] if isinstance(stated.base_model, str) else []
            names = stated.datasets if isinstance(stated.datasets, list) else []
            return TrainingData(_together(map(_tasks_of_hub, names)), next(iter(bases), None))
    name = name_on_hub(reference)
    if name is None:
        return UNKNOWN
    import mteb

    try:
        known = mteb.get_model_meta(name, fetch_from_hf=False).training_datasets
    except (KeyError, ValueError):  # a model that mteb has not
        known = None
    return TrainingData(None if known is None else tuple(sorted(known)), name)


def name_on_hub(reference: str) -> str | None:
    """Name on the hub of a model from there, or from a package that has a model of the hub; None
    for others.
    """
    for short, long in SHORT_NAMES.items():
        if reference == long:
            return f"{_OF_SHORT_NAMES}/{short}"
    return hub_name(reference)


def _together(found: Iterable[list[str] | None]) -> tuple[str, ...] | None:
    """All tasks, sorted; None if those of one data set are not known."""
    tasks: set[str] = set()
    for some in found:
        if some is None:
            return None
        tasks.update(some)
    return tuple(sorted(tasks))


def _tasks_of(dataset: DatasetConfig) -> list[str] | None:
    source = dataset.source
    if source.kind == _MTEB_SOURCE:
        return [str(source.task)]  # type: ignore[attr-defined] # of a package that adds the source
    name = hub_dataset(dataset)
    return [] if name is None else _tasks_of_hub(name)


def _tasks_of_hub(dataset: str) -> list[str] | None:
    """Tasks that read a data set of the hub; None if no task does, since it may be a copy of one
    under another name.
    """
    from mteb.get_tasks import TASK_LIST

    found = [
        task.metadata.name for task in TASK_LIST if task.metadata.dataset.get("path") == dataset
    ]
    return found or None
