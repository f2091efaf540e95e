"""FAISS indexes for the number types of a store."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from rayembed.errors import ConfigError
from rayembed.search.faiss_library import require_faiss
from rayembed_extras.indexing.store import Layout


def new_index(settings: Mapping[str, Any], layout: Layout) -> Any:
    """Make an empty index by the settings `factory`; exact without one.

    Raises:
        ConfigError: FAISS makes none of them for this number type.
    """
    faiss = require_faiss("files of the store faiss")
    factory = settings.get("factory")
    width = layout.dimensions
    try:
        if layout.number_type == "bits":
            return faiss.index_binary_factory(8 * -(-width // 8), factory or "BFlat")
        if factory:
            return faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
        exact = {
            "float32": partial(faiss.IndexFlatIP, width),
            "float16": partial(_codes, faiss, width, faiss.ScalarQuantizer.QT_fp16),
            "int8": partial(_codes, faiss, width, faiss.ScalarQuantizer.QT_8bit_direct_signed),
        }
        return exact[layout.number_type]()
    except (RuntimeError, TypeError) as error:
        kind = "index_binary_factory" if layout.number_type == "bits" else "index_factory"
        raise ConfigError(
            f"store.index.factory: faiss.{kind} makes no {factory!r} of {width} dimensions "
            f"for number_type {layout.number_type}: {last_line(error)}"
        ) from error


def set_options(faiss: Any, index: Any, options: Mapping[str, Any]) -> None:
    """Set parameters of searches.

    Raises:
        ConfigError: the index has no such parameter.
    """
    for name, value in options.items():
        try:
            if isinstance(index, faiss.IndexBinary):
                holder = index.hnsw if name == "efSearch" else index
                if not hasattr(holder, name):
                    raise AttributeError(f"there is no {name}")
                setattr(holder, name, value)
            else:
                faiss.ParameterSpace().set_index_parameter(index, name, float(value))
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"FAISS's index has no search parameter {name!r} with the value {value!r}: "
                f"{last_line(error)}"
            ) from error


def last_line(error: BaseException) -> str:
    """Message of a FAISS error without the place in its source."""
    return str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)


def _codes(faiss: Any, width: int, codes: Any) -> Any:
    index = faiss.IndexScalarQuantizer(width, codes, faiss.METRIC_INNER_PRODUCT)
    index.is_trained = True  # these codes have no ranges to learn
    return index
