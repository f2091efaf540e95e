"""Load the model of an index in the processes that embed, check it, and embed texts."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from rayembed.assets.array_files import load_array, save_array
from rayembed.assets.folder_formats import format_of
from rayembed.assets.storage import exists, join
from rayembed.config.backbone import Dtype
from rayembed.data.engine.work_items import Result
from rayembed.data.vectors.teacher import narrow_linear_layers, take_free_threads
from rayembed.display.progress import tell
from rayembed.errors import ArtifactError
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import load_as_saved, load_model
from rayembed.models.passes.encoding import encode, encode_tokens
from rayembed.models.passes.fitting import room_for
from rayembed.models.transformer_model import TransformerModel
from rayembed.proof.check import Checked, cosines, tolerated
from rayembed.proof.proof import NumberType, ProofText, read_proof
from rayembed.proof.texts import proof_texts, tokens_of
from rayembed.proof.write import TOLERANCE
from rayembed.registry.registered_model import find_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexModelSpec:
    """Model and settings by which all processes of a job embed alike."""

    reference: str
    """Reference with a fixed version."""
    weights: str
    """Fingerprint of weights and tokenizer."""
    tracking_uri: str | None
    instruction: str | None
    dimensions: int
    dtype: Dtype
    tokens_per_batch: int | None
    golden: str
    """Folder of vectors that the model gave when the index was first built, for models without a
    proof of their own."""


class _Golden(NamedTuple):
    """Texts whose vectors are known."""

    texts: tuple[ProofText, ...]
    vectors: np.ndarray
    tolerance: float
    """Lowest cosine that counts as the same."""
    normalised: bool
    """Whether lengths are compared, too."""
    when: str
    """Whose vectors they are, for an error."""


class LoadedModel:
    """A loaded model that embeds as the settings say."""

    def __init__(self, spec: IndexModelSpec, device: str) -> None:
        self.spec = spec
        self.folder = model_folder(spec.reference, spec.weights, spec.tracking_uri)
        # Ray gives each process one thread for each CPU that it reserves.
        take_free_threads("embedding")
        own_format = format_of(self.folder) is not None
        self._kind: NumberType = "int8" if own_format else spec.dtype
        self._halved = spec.dtype == "bfloat16" and not own_format
        model = (
            load_as_saved(self.folder)
            if self._halved
            else load_model(self.folder, dtype=None if own_format else spec.dtype)
        )
        if self._halved:
            narrow_linear_layers(model)
        with room_for(f"the model {spec.reference!r}"):
            self.model: TransformerModel = model.to(device)
        self._device = "cpu" if own_format else torch.device(device).type
        self._golden: _Golden | None = None

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, int]:
        """Embed documents to (N, D) float32 unit vectors; return them with the number of tokens.

        Raises:
            ArtifactError: the model gives no finite numbers for a text.
        """
        tokens = 0

        def count(more: int) -> None:
            nonlocal tokens
            tokens += more

        with self._casting():
            vectors = encode(
                self.model,
                texts,
                role="document",
                instruction=self.spec.instruction,
                tokens_per_batch=self.spec.tokens_per_batch,
                progress=lambda done, of: tell(done / of),
                allow_empty=True,
                finite=True,
                count_tokens=count,
            )
        return cut(vectors, self.spec.dimensions), tokens

    def check(self, at_most: int | None = None, start: int = 0) -> bool:
        """Raise unless the model gives the vectors of its proof, or of the index's first build.

        Args:
            at_most: number of its texts that are embedded, from text `start` on; None: all.

        Returns:
            Whether all texts were embedded.

        Raises:
            ArtifactError: it gives others; the message says for which text.
        """
        if self._golden is None:
            self._golden = self._read_golden()
        texts, right, tolerance, normalised, when = self._golden
        number = min(at_most or len(texts), len(texts))
        chosen = [(start + i) % len(texts) for i in range(number)]
        vectors = self._embed([texts[i] for i in chosen])
        found = Checked(vectors, *cosines(vectors, right[chosen]), tolerance, normalised)
        if wrong := found.wrong:
            first = texts[chosen[wrong[0]]]
            raise ArtifactError(
                f"the model {self.spec.reference!r} gives other vectors here than {when}: "
                f"{len(wrong)} of {number} texts, the lowest cosine is {found.worst:.4f} where "
                f"{tolerance:.4f} is allowed, the first text is {first.text[:60]!r} "
                f"({first.role}). Libraries, hardware or the model's folder have "
                "changed; `rayembed verify` on the folder names the cause. Nothing that this "
                "process embedded since its last check is used"
            )
        return number == len(texts)

    def _read_golden(self) -> "_Golden":
        """Read the model's proof, or the vectors of the first build, which writes them."""
        proof = read_proof(self.folder)
        if proof is not None:
            computed = "bfloat16" if self._halved else self.model.number_type
            tolerance = proof.tolerance[tolerated(proof, computed)]
            return _Golden(proof.texts, proof.vectors, tolerance, proof.normalised, "its proof has")
        texts = tuple(proof_texts(self.model, {})[0])
        # Of these weights: a job that was killed before the record may have had another model.
        asked = [(text.text, text.role, text.prompt) for text in texts]
        named = repr([self.spec.weights, asked])
        path = join(self.spec.golden, f"{xxhash.xxh3_64_hexdigest(named.encode())}.npy")
        if not exists(path):
            save_array(path, self._embed(texts))
        when = "when the index was first built"
        return _Golden(texts, load_array(path), TOLERANCE[self._kind], False, when)

    def _embed(self, texts: Sequence[ProofText]) -> np.ndarray:
        tokens = tokens_of(self.model, texts)
        if len(tokens) < len(texts):
            raise ArtifactError(
                f"the tokenizer of the model {self.spec.reference!r} refuses a text of the "
                "model's proof; copy the model's folder again"
            )
        with self._casting():
            made: np.ndarray = encode_tokens(self.model, tokens)
        return made

    def _casting(self) -> AbstractContextManager[Any]:
        if not self._halved:
            return nullcontext()
        cast_inputs: Any = torch.autocast(self._device, torch.bfloat16)
        found: AbstractContextManager[Any] = cast_inputs
        return found


def cut(vectors: np.ndarray, dimensions: int) -> np.ndarray:
    """Keep the first dimensions of (N, D) unit vectors, at unit length."""
    if dimensions == vectors.shape[1]:
        return vectors
    kept = vectors[:, :dimensions]
    unit: np.ndarray = kept / np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), 1e-12)
    return unit


def model_folder(reference: str, weights: str, tracking_uri: str | None) -> Path:
    """Return this machine's folder of a model.

    Raises:
        ArtifactError: it has other weights than the fingerprint.
    """
    folder = find_folder(reference, tracking_uri)
    if (seen := weights_fingerprint(folder)) != weights:
        raise ArtifactError(
            f"the model {reference!r} has weights {seen} on this machine, but the job began with "
            f"{weights}; give all machines the same model and start the job again"
        )
    return folder


@lru_cache(maxsize=1)
def load(spec: IndexModelSpec, device: str) -> LoadedModel:
    """Load and check a model; a process does it once.

    Raises:
        ArtifactError: as `model_folder` and `LoadedModel.check`.
    """
    loaded = LoadedModel(spec, device)
    loaded.check()
    return loaded


Load = Callable[[IndexModelSpec, str], LoadedModel]


BEFORE, AFTER = "before", "after"
"""Times of a check: before any work, and after the last part."""


@dataclass(frozen=True)
class ModelCheck:
    """Work item: a check of the model."""

    when: str

    @property
    def key(self) -> str:
        """Time of the check."""
        return self.when


def check_model(item: ModelCheck, spec: IndexModelSpec, device: str) -> Result:
    """Check the model by its proof, which loading does already; return a result without
    rows.

    Raises:
        ArtifactError: as `LoadedModel.check`.
    """
    loaded = load(spec, device)
    if item.when == AFTER:
        loaded.check()
    return {"rows_in": 0, "rows_out": 0, "rejected": {}}
