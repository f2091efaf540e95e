"""`rayembed.index`: the arguments of a Python call as the settings of the job."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayembed.api.calls import assignments_of, check_addresses, reference_of, shown
from rayembed.config.override import overridden
from rayembed.data.given_rows import rows_file
from rayembed.errors import ConfigError
from rayembed.pipeline.storage import absolute_storage
from rayembed_extras.indexing.build import build_index
from rayembed_extras.indexing.outcome import Indexed
from rayembed_extras.indexing.places import store_values
from rayembed_extras.indexing.report import print_indexed
from rayembed_extras.indexing.settings import IndexRun


def index_documents(
    documents: Any,
    model: Any,
    name: str,
    *,
    store: str | Mapping[str, Any],
    to: str | Path | None,
    update: bool,
    output: str | Path,
    settings: Mapping[str, Any],
) -> Indexed:
    """Build or update an index from Python arguments; see `rayembed.index`."""
    check_addresses(output=output, settings=settings, store=store, to=to)
    storage = absolute_storage(str(output))
    run = overridden(
        IndexRun,
        {
            "name": name,
            "model": {"reference": model_reference(model)},
            "documents": {"path": rows_file(rows_with_text(documents), storage)},
            "store": store_values(store, to),
            "placement": {"storage_path": storage},
        },
        assignments_of(settings),
    )
    with shown():
        made = build_index(run, update=update)
        print_indexed(made)
    return made


def model_reference(model: Any) -> str:
    """Return the reference of a model, a loaded model, or a result of a training."""
    if isinstance(model, str | Path):
        return reference_of(model)
    loaded = getattr(model, "reference", None) or getattr(model, "folder", None)
    if loaded is None:
        raise ConfigError(
            f"model is {type(model).__name__}; give a reference, a folder, or a result of "
            "rayembed.load or rayembed.train"
        )
    return reference_of(loaded)


def rows_with_text(documents: Any) -> Any:
    """Return rows with a column `text` for a list of texts; other documents unchanged."""
    if isinstance(documents, Sequence) and not isinstance(documents, str):
        if documents and all(isinstance(one, str) for one in documents):
            return [{"text": one} for one in documents]
        if documents and all(
            isinstance(one, tuple | list) and len(one) == 2 and isinstance(one[1], str)
            for one in documents
        ):
            return [{"id": one[0], "text": one[1]} for one in documents]
    return documents
