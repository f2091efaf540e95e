"""Writing of a model folder's proof, from the model as it is loaded from that folder."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from rayembed.assets.folder_formats import format_of
from rayembed.config.table import NamedTable
from rayembed.errors import ArtifactError
from rayembed.machine.hardware import free_memory
from rayembed.models.contract import Tokens
from rayembed.models.loading.files import (
    count_parameters,
    read_json_value,
    weights_fingerprint,
)
from rayembed.models.loading.load import load_model, saved_dtype
from rayembed.models.loading.saved_folder import SETTINGS_FILE
from rayembed.models.loading.saved_prompts import saved_instructions
from rayembed.models.passes.encoding import encode_tokens
from rayembed.models.transformer_model import TransformerModel
from rayembed.proof.check import LENGTH_ERROR, cosines, versions
from rayembed.proof.proof import Mistake, NumberType, Proof, ProofText, read_proof
from rayembed.proof.texts import proof_texts, tokens_of

logger = logging.getLogger(__name__)

TOLERANCE: Mapping[NumberType, float] = {"float32": 0.9999, "bfloat16": 0.999, "int8": 0.95}
"""Lowest cosines where rounding was not tried on the model."""
_ROUNDED: tuple[NumberType, ...] = ("bfloat16", "int8")
_MARGIN = 3.0
"""Distance from cosine 1 that is allowed, in those of the model's own rounded vectors: other texts,
and servers that round at other places."""
_PACKAGES = ("rayembed", "torch", "transformers", "tokenizers")
_LEAST = 0.9
"""Lowest tolerance: a model that rounding moves further is not served in that number type."""


@dataclass(frozen=True)
class MistakeMaker:
    """Entry of the table of mistakes, which may have further texts to show them by."""

    make: Callable[[TransformerModel, Sequence[ProofText], np.ndarray], Iterable[Mistake]]
    """Function from a loaded model, the proof's texts and their right vectors to the mistakes that
    the model can be served with. Those named `bfloat16` and `int8` set the tolerances."""
    texts: Callable[[TransformerModel], tuple[list[ProofText], list[str]]] = lambda _: ([], [])
    """Function from a loaded model to further texts, and sentences on those that are too costly."""


MISTAKES = NamedTable("rayembed.proof_mistakes", MistakeMaker, "maker of mistakes", {})
"""Makers of mistakes, all by entry points; without one a proof has right vectors alone."""


def write_proof(folder: Path) -> Proof:
    """Write the proof of a model's folder, unless it has one of these weights; return it.

    The model is loaded on the CPU, in float32 where that takes at most half of the free memory,
    else in its saved number type; a graph has its own.

    Raises:
        ArtifactError: no model that can be loaded, or one without finite vectors.
        ConfigError: the folder is of a format that nothing here reads.
    """
    try:
        if (known := read_proof(folder)) is not None:
            return known
    except ArtifactError:
        pass  # damaged, or of the weights that were here before
    size = 4 * (count_parameters(folder) or 0)
    exact = size <= free_memory("cpu") // 2
    model = load_model(folder, dtype="float32" if exact else saved_dtype(folder))
    proof = prove(model, saved_instructions(folder, model.config), normalised=normalises(folder))
    own = format_of(folder)
    packages = (*proof.made_by, *(own.packages(folder) if own else ()))
    proof = replace(proof, weights=weights_fingerprint(folder), made_by=versions(packages))
    proof.write(folder)
    return proof


def add_proof(folder: Path) -> None:
    """Write the proof of a folder, or warn why it has none: a finished model is worth more.

    A package may add an architecture whose passes give no vectors, or makers of mistakes that fail.
    """
    try:
        write_proof(folder)
    except Exception as error:  # noqa: BLE001 # whatever a package does there
        logger.warning(
            "cannot write reference vectors (proof) to %s: %s: %s",
            folder,
            type(error).__name__,
            error,
        )


def normalises(folder: Path) -> bool:
    """Whether sentence-transformers, too, gives vectors of length 1 of the folder."""
    modules = folder / "modules.json"
    if (folder / SETTINGS_FILE).is_file() or not modules.is_file():
        return True
    return bool(read_json_value(modules)[-1]["type"].endswith("Normalize"))


def prove(
    model: TransformerModel, instructions: Mapping[str, str], *, normalised: bool = True
) -> Proof:
    """Make the proof of a loaded model, without the fingerprint of its weights.

    Args:
        instructions: task definitions by name.
        normalised: see `Proof`.

    Raises:
        ArtifactError: a vector is not of unit length, or there is no text that the model takes.
    """
    makers = MISTAKES.members().values()
    texts, left_out = proof_texts(model, instructions, [maker.texts for maker in makers])
    if not texts:
        raise ArtifactError(
            "cannot write reference vectors (proof): the tokenizer refuses all of its test texts"
        )
    right = _vectors(model, tokens_of(model, texts))
    _, lengths = cosines(right, right)
    if not (np.abs(lengths - 1) <= LENGTH_ERROR).all():
        bad = texts[int(np.argmin(np.abs(lengths - 1) <= LENGTH_ERROR))]
        raise ArtifactError(
            f"cannot write reference vectors (proof): the vector of {bad.text[:40]!r} does not "
            "have length 1"
        )
    mistakes = [mistake for maker in makers for mistake in maker.make(model, texts, right)]
    return Proof(
        weights="",
        dimensions=tuple(model.dimensions),
        normalised=normalised,
        dtype=cast(NumberType, model.number_type),
        lengths=dict(model.tokenizer.max_lengths),
        texts=tuple(texts),
        vectors=right,
        tolerance=tolerances(right, mistakes),
        mistakes=tuple(one for one in mistakes if _differs(one, right, normalised)),
        made_by=versions(_PACKAGES),
        left_out=tuple(left_out),
    )


def _vectors(model: TransformerModel, tokens: Sequence[Tokens]) -> np.ndarray:
    """Vectors of tokenised texts, computed once of equal ones: roles often have the same prompt."""
    places: dict[tuple[bytes, ...], int] = {}
    keys = [tuple(one[name].tobytes() for name in sorted(one)) for one in tokens]
    order = [places.setdefault(key, len(places)) for key in keys]
    distinct = dict(zip(order, tokens, strict=True))
    return encode_tokens(model, [distinct[place] for place in sorted(distinct)])[order]


def tolerances(right: np.ndarray, mistakes: Iterable[Mistake]) -> dict[NumberType, float]:
    """Lowest cosine that counts as the same, by number type."""
    made = dict(TOLERANCE)
    for mistake in mistakes:
        for kind in _ROUNDED:
            if mistake.name == kind:
                found, _ = cosines(mistake.vectors, right[list(mistake.texts)])
                loss = _MARGIN * (1 - float(found.min()))
                made[kind] = round(max(_LEAST, min(TOLERANCE["float32"], 1 - loss)), 6)
    return made


def _differs(mistake: Mistake, right: np.ndarray, normalised: bool) -> bool:
    """Whether a mistake changes any vector by more than rounding."""
    found, lengths = cosines(mistake.vectors, right[list(mistake.texts)])
    finite = np.isfinite(mistake.vectors.astype(np.float16)).all()
    longer = normalised and np.abs(lengths - 1).max() > LENGTH_ERROR
    apart = longer or found.min() < TOLERANCE["float32"]
    return bool(finite and apart)
