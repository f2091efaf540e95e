"""Maps from a new model's query vectors to the document vectors of an older model.

A map's folder holds `map.json` and `map.safetensors`. N vectors, D_new and D_old dimensions.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.storage import join, read_bytes, write_atomic
from rayembed.errors import ArtifactError

MapKind = Literal["identity", "orthogonal", "affine", "low_rank", "mlp", "ranking"]
"""Kinds of maps, see `fitting`."""

SETTINGS_FILE, WEIGHTS_FILE = "map.json", "map.safetensors"
FORMAT = 1
"""Format of the files; raise it when their content changes its meaning."""

_REMEDY = "Fit the map again with `rayembed upgrade --road adapter`"
_ARRAYS: Mapping[str, tuple[str, ...]] = {
    "identity": (),
    "orthogonal": ("weight",),
    "affine": ("weight", "bias"),
    "low_rank": ("down", "up", "bias"),
    "mlp": ("weight", "bias", "inner", "inner_bias", "outer", "outer_bias"),
    "ranking": ("weight", "bias"),
}
"""Kind → names of its arrays."""
_TIMED_VECTORS = 200


@dataclass(frozen=True)
class QueryMap:
    """A map from (N, D_new) vectors to (N, D_old) float32 unit vectors."""

    kind: MapKind
    dimensions: tuple[int, int]
    """D_new and D_old."""
    arrays: Mapping[str, np.ndarray]
    """float32 arrays, applied to row vectors: `weight` (D_new, D_old), `bias` (D_old,), `down`
    (D_new, r), `up` (r, D_old), `inner` (D_new, h), `outer` (h, D_old)."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Index, table, fingerprints of both models, and how the map was fitted."""

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Map (N, D_new) vectors to (N, D_old) float32 unit vectors.

        Raises:
            ArtifactError: the vectors have another width than D_new.
        """
        given = np.asarray(vectors, dtype=np.float32)
        if given.ndim != 2 or given.shape[1] != self.dimensions[0]:
            raise ArtifactError(
                f"the map takes vectors of shape (N, {self.dimensions[0]}), but these have the "
                f"shape {given.shape}; it belongs to the model {self.facts.get('model', '')}"
            )
        return unit(self._mapped(given))

    def _mapped(self, given: np.ndarray) -> np.ndarray:
        a = self.arrays
        if self.kind == "identity":
            return given
        made = given @ a["down"] @ a["up"] if self.kind == "low_rank" else given @ a["weight"]
        if "bias" in a:
            made = made + a["bias"]
        if self.kind == "mlp":
            made = made + gelu(given @ a["inner"] + a["inner_bias"]) @ a["outer"] + a["outer_bias"]
        return np.asarray(made, np.float32)

    def microseconds(self) -> float:
        """Measure the time to map one vector, alone: the fastest of many."""
        vector = np.ones((1, self.dimensions[0]), np.float32)
        times = []
        for _ in range(_TIMED_VECTORS):
            began = time.perf_counter()
            self(vector)
            times.append(time.perf_counter() - began)
        return 1e6 * min(times)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def content(self) -> tuple[bytes, str]:
        """The arrays as a safetensors file, and its digest."""
        from safetensors.numpy import save

        # The tests' and loader's check: an object without arrays is a valid file, too.
        content = save({name: np.ascontiguousarray(self.arrays[name]) for name in self.arrays})
        return content, xxhash.xxh3_128_hexdigest(content)

    def save(self, folder: str | Path) -> None:
        """Write the map to a folder, on disk or in object storage.

        Raises:
            StorageError: the folder cannot be written.
        """
        content, digest = self.content()
        write_atomic(join(folder, WEIGHTS_FILE), content)
        values = {
            "format": FORMAT,
            "kind": self.kind,
            "dimensions": list(self.dimensions),
            "weights_digest": digest,
            "facts": dict(self.facts),
        }
        write_json(join(folder, SETTINGS_FILE), values, indent=2)


def load_map(folder: str | Path) -> QueryMap:
    """Load the map that `QueryMap.save` wrote; it maps (N, D_new) vectors to (N, D_old) float32
    unit vectors.

    Raises:
        ArtifactError: files are missing, damaged, or of another format.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    values = read_json(join(folder, SETTINGS_FILE), _REMEDY)
    if values.get("format") != FORMAT or values.get("kind") not in _ARRAYS:
        raise ArtifactError(
            f"the map in {str(folder)!r} has format {values.get('format')} and kind "
            f"{values.get('kind')!r}, but this version reads format {FORMAT}. {_REMEDY}"
        )
    content = read_bytes(join(folder, WEIGHTS_FILE), _REMEDY)
    if xxhash.xxh3_128_hexdigest(content) != values.get("weights_digest"):
        raise ArtifactError(
            f"{join(folder, WEIGHTS_FILE)!r} does not have the content that {SETTINGS_FILE} "
            f"states. {_REMEDY}"
        )
    try:
        arrays = {name: np.asarray(array, np.float32) for name, array in load(content).items()}
    except SafetensorError as error:
        raise ArtifactError(f"cannot read the map in {str(folder)!r}: {error}") from error
    kind, (new, old) = values["kind"], values["dimensions"]
    if sorted(arrays) != sorted(_ARRAYS[kind]):
        raise ArtifactError(
            f"the map in {str(folder)!r} is of kind {kind} and has the arrays {sorted(arrays)}, "
            f"not {sorted(_ARRAYS[kind])}. {_REMEDY}"
        )
    return QueryMap(kind, (int(new), int(old)), arrays, values.get("facts", {}))


cached_map = lru_cache(maxsize=8)(load_map)
"""`load_map`, for servers that map each request."""


def identity_map(new: int, old: int) -> QueryMap | None:
    """Return the map that changes nothing; None if the dimensions differ."""
    return QueryMap("identity", (new, old), {}) if new == old else None


def unit(vectors: np.ndarray) -> np.ndarray:
    """Scale (N, D) vectors to float32 unit vectors; zeros stay zeros."""
    given = np.asarray(vectors, np.float32)
    lengths = np.linalg.norm(given, axis=1, keepdims=True)
    made: np.ndarray = given / np.maximum(lengths, np.float32(1e-12))
    return made


def gelu(x: np.ndarray) -> np.ndarray:
    """Compute torch's `gelu(x, approximate="tanh")`."""
    made: np.ndarray = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return made
