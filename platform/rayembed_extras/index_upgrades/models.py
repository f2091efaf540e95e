"""Load the old and the new model of an upgrade, embed texts with them, and measure the rate."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rayembed.config.types import Role
from rayembed_extras.index_upgrades.maps import unit
from rayembed_extras.index_upgrades.price import Rate

if TYPE_CHECKING:
    from rayembed.models.contract import EmbeddingModel

_COUNTED_TEXTS = 500
"""Texts whose tokens are counted."""


@dataclass
class UpgradeModel:
    """A loaded model with its instructions and width, which measures its own rate."""

    model: "EmbeddingModel"
    weights: str
    """Fingerprint of its weights and tokenizer."""
    reference: str
    instruction: str | None = None
    query_instruction: str | None = None
    dimensions: int = 0
    """First dimensions that are kept; 0: all."""
    texts: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)
    tokens: float = field(default=0.0, init=False)
    embedded: int = field(default=0, init=False)
    """Distinct texts embedded so far, queries and documents."""
    embedded_tokens: float = field(default=0.0, init=False)

    @property
    def width(self) -> int:
        """Dimensions of its vectors."""
        return self.dimensions or self.model.dimensions[0]

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Embed queries to (N, D) float32 unit vectors."""
        self._count(texts, "query", self.query_instruction)
        return self._embed(texts, "query", self.query_instruction)

    def documents(self, texts: Sequence[str]) -> np.ndarray:
        """Embed documents to (N, D) float32 unit vectors, and add their time to the rate."""
        began = time.perf_counter()
        vectors = self._embed(texts, "document", self.instruction)
        self.seconds += time.perf_counter() - began
        # An index embeds each distinct text of a part once, as `encode` does here.
        self.texts += len(set(texts))
        per_text = self._count(texts, "document", self.instruction)
        self.tokens = self.tokens or per_text
        return vectors

    @property
    def rate(self) -> Rate:
        """Measured rate of documents so far."""
        return Rate(self.texts, self.seconds, self.tokens)

    def _embed(self, texts: Sequence[str], role: Role, instruction: str | None) -> np.ndarray:
        from rayembed.api.calls import EncodingProgress
        from rayembed.models.passes.encoding import encode

        with EncodingProgress() as progress:
            vectors = encode(
                self.model,
                list(texts),
                role=role,
                instruction=instruction,
                progress=progress,
                allow_empty=True,
                finite=True,
            )
        return vectors if self.width == vectors.shape[1] else unit(vectors[:, : self.width])

    def _count(self, texts: Sequence[str], role: Role, instruction: str | None) -> float:
        """Add distinct texts and their tokens to those embedded; return the tokens of a text."""
        from rayembed.models.contract import cost

        some = list(texts)[:_COUNTED_TEXTS]
        told = self.model.instruction_of(role, instruction)
        instructions = [told] * len(some) if told else None
        made = self.model.tokenizer(some, role, instructions, allow_empty=True)
        per_text = sum(map(cost, made)) / max(1, len(made))
        self.embedded += len(set(texts))
        self.embedded_tokens += len(set(texts)) * per_text
        return per_text


def registry_of(reference: str, storage: str, tracking_uri: str | None) -> str | None:
    """MLflow address in which a model reference is looked up."""
    from rayembed.registry.tracking_uri import resolve_tracking_uri

    if not reference.startswith("models:/"):
        return tracking_uri
    return resolve_tracking_uri(tracking_uri, storage, make_folder=False)


def fixed_reference(reference: str, storage: str, tracking_uri: str | None) -> str:
    """Replace an alias of a registered model by its version; other references stay unchanged."""
    from rayembed.registry.registered_model import pinned_reference

    return pinned_reference(reference, registry_of(reference, storage, tracking_uri))


def model_folder(reference: str, storage: str, tracking_uri: str | None) -> Path:
    """Local folder of a model reference, registered or not.

    Raises:
        RayembedError: there is no such model.
    """
    from rayembed.registry.registered_model import find_folder

    return find_folder(reference, registry_of(reference, storage, tracking_uri))


def weights_of(folder: Path) -> str:
    """Fingerprint of a model's weights and tokenizer, as an index's record names it."""
    from rayembed.models.loading.files import weights_fingerprint

    return weights_fingerprint(folder)


def load_upgrade_model(
    folder: Path,
    weights: str,
    reference: str,
    *,
    dtype: str = "auto",
    instruction: str | None = None,
    query_instruction: str | None = None,
    dimensions: int | None = None,
    use_gpu: bool = True,
) -> UpgradeModel:
    """Load a model from its folder.

    Raises:
        ConfigError: the model was not trained for these dimensions.
        RayembedError: the folder has no supported model.
    """
    from rayembed.errors import ConfigError
    from rayembed.machine.hardware import default_device
    from rayembed.models.loading.load import load_model

    device = default_device() if use_gpu else "cpu"
    loaded = load_model(folder, dtype=None if dtype == "auto" else dtype, device=device)  # type: ignore[arg-type]
    if dimensions is not None and dimensions not in loaded.dimensions:
        known = ", ".join(map(str, loaded.dimensions))
        raise ConfigError(
            f"dimensions = {dimensions}: {reference} gives vectors of {known} dimensions; choose "
            "one of these"
        )
    return UpgradeModel(
        loaded,
        weights,
        reference,
        instruction,
        query_instruction,
        0 if dimensions in (None, loaded.dimensions[0]) else int(dimensions or 0),
    )
