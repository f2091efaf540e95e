"""Compare vectors from a server or library with a model's stored reference vectors (proof)."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata

import numpy as np

from rayembed.proof.proof import NumberType, Proof, ProofText

Embed = Callable[[Sequence[ProofText]], np.ndarray]
"""Function from texts to their vectors (N, D'), as a server or a library gives them."""

LENGTH_ERROR = 0.01
"""Largest difference of a vector's length from 1; bfloat16 keeps 3 digits."""


@dataclass(frozen=True)
class Checked:
    """Result of the comparison of vectors with a model's stored reference vectors."""

    vectors: np.ndarray
    """(N, D') float32, as they came."""
    cosines: np.ndarray
    """(N,) with the right vectors; 0 where the width differs or a number is not finite."""
    lengths: np.ndarray
    """(N,) of the vectors; NaN where a number is not finite."""
    tolerance: float
    """Lowest cosine that counts as the same."""
    normalised: bool
    """Whether lengths other than 1 are wrong."""

    @property
    def worst(self) -> float:
        """Lowest cosine between a text's vector and its reference vector."""
        return float(self.cosines.min())

    @property
    def wrong(self) -> tuple[int, ...]:
        """Indices of the texts whose vector differs from the reference vector, in direction or in
        length.
        """
        near = self.cosines >= self.tolerance
        if self.normalised:
            near &= np.abs(self.lengths - 1) <= LENGTH_ERROR
        return tuple(np.flatnonzero(~near).tolist())

    @property
    def same(self) -> bool:
        """Whether all vectors agree with the reference vectors within the tolerance."""
        return not self.wrong


def check(proof: Proof, embed: Embed, number_type: NumberType | None = None) -> Checked:
    """Embed the texts of a model's proof and compare their vectors with the stored reference
    vectors.

    Args:
        number_type: of the server, which sets the tolerance; None: that of the proof.

    Raises:
        ValueError: `embed` gives another number of vectors than texts.
    """
    vectors = np.asarray(embed(proof.texts), dtype=np.float32)
    return compare(proof, vectors, number_type)


def compare(proof: Proof, vectors: np.ndarray, number_type: NumberType | None = None) -> Checked:
    """Compare given vectors (N, D') of the proof's texts with the stored reference vectors; see
    `check`.
    """
    if vectors.ndim != 2 or len(vectors) != len(proof.texts):
        raise ValueError(
            f"expected one vector for each of the {len(proof.texts)} texts of the reference "
            f"vectors, but the given vectors have the shape {vectors.shape}"
        )
    tolerance = proof.tolerance[number_type or proof.dtype]
    return Checked(vectors, *cosines(vectors, proof.vectors), tolerance, proof.normalised)


def cosines(vectors: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the (N,) cosines of the rows of `vectors` and `right`, and the (N,) lengths of
    `vectors`.
    """
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    lengths[~np.isfinite(vectors).all(axis=1)] = np.nan
    if vectors.shape[1] != right.shape[1]:
        return np.zeros(len(vectors)), lengths
    unit = vectors / np.maximum(lengths, 1e-12)[:, None]
    expected = right / np.linalg.norm(right.astype(np.float64), axis=1, keepdims=True)
    return np.nan_to_num((unit * expected).sum(axis=1)), lengths


def changed_packages(proof: Proof) -> str:
    """Name the packages whose version differs from the one that computed the proof; empty if none
    does.
    """
    here = versions(proof.made_by)
    changed = [
        f"{name} {version} (here {here[name]})"
        for name, version in proof.made_by.items()
        if here.get(name, version) != version
    ]
    return f"the right vectors were computed with {', '.join(changed)}" if changed else ""


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed packages among those named."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def tolerated(proof: Proof, computed: str) -> NumberType:
    """Number type whose tolerance a loaded model must keep that computes in `computed`.

    float32 where model and proof compute in it, else the loosest: the proof's tolerance of bfloat16
    comes from rounded weights, and real bfloat16 may differ by more (an untrained decoder did).
    """
    if computed == proof.dtype == "float32":
        return "float32"
    return min(proof.tolerance, key=lambda kind: proof.tolerance[kind])
