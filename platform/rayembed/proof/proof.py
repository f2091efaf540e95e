"""Read and write a model folder's proof: texts and the model's reference vectors for them, in two
files.

`proof/proof.json` has texts, tolerances and descriptions, `proof/vectors.safetensors` the vectors:
`right` (N, D) float32 of all texts, and `mistake.NAME` (n, D') float16 of the texts that the
mistake names. docs/verification.md has every field.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rayembed.assets.folder_formats import PROOF_FOLDER
from rayembed.assets.storage import exists, join, read_bytes, write_atomic
from rayembed.config.types import Role
from rayembed.errors import ArtifactError
from rayembed.models.loading.files import read_json, weights_fingerprint

PROOF_FILE = "proof.json"
VECTORS_FILE = "vectors.safetensors"
FORMAT = 2

_logger = logging.getLogger(__name__)

NumberType = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True)
class ProofText:
    """One text of a model's proof, with the role and prompt that a server must use for it."""

    text: str
    role: Role
    prompt: str
    """Literal text before it."""
    instruction: str | None = None
    """Task definition that makes the prompt; None: the model's default for the role."""
    about: str = ""
    """Property that the text checks, such as `CJK` or `document of limit + 1 tokens`."""
    tokens: int | None = None
    """Tokens of a text that was made to have so many, prompt and special ones included."""


@dataclass(frozen=True)
class Mistake:
    """A common mistake in serving a model, such as wrong pooling, with the vectors that it leads
    to.
    """

    name: str
    """Name as in `mean_pooling`."""
    what: str
    """The mistake in words: `mean pooling where the model has last-token pooling`."""
    advice: str
    """What to change in the server."""
    texts: tuple[int, ...]
    """Indices of its texts among those of the proof."""
    vectors: np.ndarray
    """(n, D') float32, rounded to float16. Of unit length, unless the mistake is their length."""


@dataclass(frozen=True)
class Proof:
    """A model's reference vectors of some texts, with tolerances and the vectors of common serving
    mistakes.
    """

    weights: str
    """Fingerprint of weights, tokenizer and settings that gave the vectors."""
    dimensions: tuple[int, ...]
    """Widths at which vectors may be cut, the full one first."""
    dtype: NumberType
    """Number type in which the right vectors were computed."""
    normalised: bool
    """Whether the folder gives vectors of length 1; if not, directions alone are compared."""
    lengths: Mapping[Role, int]
    """Maximum tokens of a text, special ones and prompt included."""
    texts: tuple[ProofText, ...]
    vectors: np.ndarray
    """(N, D) float32 unit vectors."""
    tolerance: Mapping[NumberType, float]
    """Lowest cosine with a right vector that counts as the same, by the server's number type."""
    mistakes: tuple[Mistake, ...] = ()
    made_by: Mapping[str, str] = field(default_factory=dict)
    """Version of each package that computed the vectors."""
    left_out: tuple[str, ...] = ()
    """Texts that the proof lacks and why, in a sentence each."""

    def part(self, chosen: Sequence[int]) -> "Proof":
        """Return the proof of some of the texts, without mistakes."""
        texts = tuple(self.texts[i] for i in chosen)
        return replace(self, texts=texts, vectors=self.vectors[list(chosen)], mistakes=())

    def write(self, folder: Path) -> None:
        """Write the proof into a model's folder, and replace an older one."""
        import safetensors.numpy

        arrays = {"right": np.ascontiguousarray(self.vectors, np.float32)}
        for mistake in self.mistakes:
            arrays[_key(mistake.name)] = np.ascontiguousarray(mistake.vectors, np.float16)
        described = {
            "format": FORMAT,
            "weights": self.weights,
            "dimensions": list(self.dimensions),
            "dtype": self.dtype,
            "made_by": dict(self.made_by),
            "normalised": self.normalised,
            "lengths": dict(self.lengths),
            "tolerance": dict(self.tolerance),
            "left_out": list(self.left_out),
            "texts": [asdict(text) for text in self.texts],
            "mistakes": [
                {"name": m.name, "what": m.what, "advice": m.advice, "texts": list(m.texts)}
                for m in self.mistakes
            ],
        }
        place = folder / PROOF_FOLDER
        place.mkdir(exist_ok=True)
        # Vectors first: with other texts than these they would be refused, not believed.
        write_atomic(place / VECTORS_FILE, safetensors.numpy.save(arrays))
        text = json.dumps(described, indent=1, ensure_ascii=False) + "\n"
        write_atomic(place / PROOF_FILE, text.encode())


def has_proof(folder: str) -> bool:
    """Whether a model's folder in storage has a proof of the present format; its content is not
    checked.
    """
    path = join(folder, PROOF_FOLDER, PROOF_FILE)
    try:
        return exists(path) and json.loads(read_bytes(path)).get("format") == FORMAT
    except (ValueError, AttributeError):
        return False


def read_proof(folder: Path) -> Proof | None:
    """Read the reference vectors (proof) stored in a model's folder; None if it has none.

    One of an earlier format counts as none, with a warning: the model itself is as good as before.

    Raises:
        ArtifactError: it is damaged, of a later format, or of other weights than the folder's.
    """
    path = folder / PROOF_FOLDER / PROOF_FILE
    if not path.is_file():
        return None
    values = read_json(path)
    written = values.get("format")
    if isinstance(written, int) and written < FORMAT:
        _logger.warning(
            "the model's reference vectors (proof) in %r have the earlier format %s and are not "
            "compared; register or export the model again, which writes new ones",
            str(path),
            written,
        )
        return None
    if written != FORMAT:
        raise ArtifactError(
            f"the model's reference vectors (proof) in {str(path)!r} have format {written!r}, but "
            f"this version of rayembed reads format {FORMAT}. Update rayembed, or register or "
            "export the model again, which writes a new proof"
        )
    try:
        proof = _proof_of(values, _arrays(path.with_name(VECTORS_FILE)))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ArtifactError(
            f"the model's reference vectors (proof) in {str(path.parent)!r} are damaged "
            f"({type(error).__name__}: {error}); copy the model's folder again"
        ) from error
    weights = weights_fingerprint(folder)
    if proof.weights != weights:
        raise ArtifactError(
            f"the model's reference vectors (proof) in {str(path.parent)!r} belong to the weights "
            f"{proof.weights}, but the folder has the weights {weights}: weights, tokenizer or "
            "settings were changed since the vectors were written. Copy the whole folder again, "
            "or remove its folder proof and register the model, which writes new reference vectors"
        )
    return proof


def _arrays(path: Path) -> dict[str, np.ndarray]:
    import safetensors
    import safetensors.numpy

    try:
        found: dict[str, np.ndarray] = safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ArtifactError(
            f"cannot read the model's reference vectors (proof) {str(path)!r}: {error}"
        ) from error
    return found


def _proof_of(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Proof:
    texts = tuple(ProofText(**text) for text in values["texts"])
    right = arrays["right"]
    width = values["dimensions"][0]
    if right.shape != (len(texts), width) or not np.isfinite(right).all():
        raise ValueError(
            f"the reference vectors of {len(texts)} texts have the shape {right.shape}, or are "
            "not all finite"
        )
    mistakes = []
    for one in values["mistakes"]:
        vectors = arrays[_key(one["name"])].astype(np.float32)
        places = tuple(map(int, one["texts"]))
        if len(vectors) != len(places) or not set(places) <= set(range(len(texts))):
            raise ValueError(
                f"the serving mistake {one['name']!r} has {len(vectors)} vectors for the texts "
                f"{places}, but must have one vector for each of them, and only texts that are "
                "there"
            )
        mistakes.append(Mistake(one["name"], one["what"], one["advice"], places, vectors))
    return Proof(
        weights=values["weights"],
        dimensions=tuple(values["dimensions"]),
        dtype=values["dtype"],
        normalised=bool(values["normalised"]),
        lengths=dict(values["lengths"]),
        texts=texts,
        vectors=right,
        tolerance=dict(values["tolerance"]),
        mistakes=tuple(mistakes),
        made_by=dict(values["made_by"]),
        left_out=tuple(values["left_out"]),
    )


def _key(name: str) -> str:
    return f"mistake.{name}"
