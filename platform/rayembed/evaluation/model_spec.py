"""Specs of evaluated models: picklable descriptions from which workers load a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from rayembed.config.table import NamedTable
from rayembed.config.types import Role, StoredVectors
from rayembed.errors import ArtifactError, ConfigError
from rayembed.evaluation.prompts import ModelPrompts, role_of
from rayembed.models.loading.files import weights_fingerprint
from rayembed.search.faiss_library import require_faiss

if TYPE_CHECKING:
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.models import ModelMeta
    from mteb.types import PromptType

SCORES = 1
"""Raise it when the same vectors or texts give other scores: it is part of the names of results.
`tests/unit/test_golden.py` fails when it is due."""


@dataclass(frozen=True)
class EncodeSpec:
    """Role, prompt and context of a text: everything besides the model and the text that determines
    its vector.

    Texts of one encode spec go through the model together; tasks that share one share vectors.
    """

    role: Role
    """Role of the texts, query or document. Texts of symmetric tasks are queries."""
    instruction: str = ""
    """Task definition for models with an instruction template; for all others the literal text
    before each text; empty for none."""
    task: str = ""
    """The task's metadata, for encoders that read all of it."""
    prompt_type: str = ""
    """Prompt type of mteb, for its encoders and sentence-transformers'; empty for symmetric tasks,
    which such encoders distinguish from queries."""
    context: str = ""
    """Name of the corpus whose documents are a contextual model's context."""


EmbedTexts = Callable[[Sequence[str], EncodeSpec], np.ndarray]
"""Function from texts of one encode spec to their vectors (N, D) float32, in their order."""


@runtime_checkable
class EmbedInContext(Protocol):
    """Protocol of a loaded contextual model: an `EmbedTexts` for encode specs that name a
    context.
    """

    def __call__(self, texts: Sequence[str], encode_spec: EncodeSpec) -> np.ndarray:
        """Embed texts as `EmbedTexts` does, in the context that the encode spec names."""
        ...

    def learn(self, name: str, documents: Callable[[], Sequence[str]]) -> None:
        """Embed the documents of a named context, unless this context has been embedded
        before.

        Args:
            documents: gives them when they are needed.
        """
        ...


Similarity = Literal["cosine", "dot"]


class ModelSpec(Protocol):
    """Protocol of a picklable model description; only `load` reads the weights."""

    @property
    def meta(self) -> "ModelMeta":
        """Metadata for mteb; results are stored under the name and revision in it.

        Two models that could give a text other vectors, or that put other prompts before it, never
        share both.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """Fingerprint of everything that determines a text's vector apart from the text and its
        encode spec.
        """
        ...

    @property
    def similarity(self) -> Similarity:
        """Name of the similarity by which vectors are compared; `cosine` normalises them first."""
        ...

    @property
    def stored(self) -> StoredVectors:
        """Number type in which a search stores the vectors, and the rescoring; `load` always
        returns float32.
        """
        ...

    def encode_spec(
        self, task_metadata: "TaskMetadata", prompt_type: "PromptType | None"
    ) -> EncodeSpec:
        """Return the encode spec for a task's texts of this prompt type (None for tasks without
        queries and documents).
        """
        ...

    def shown(self, encode_spec: EncodeSpec) -> str:
        """Format the prompt before a text of this encode spec for readers."""
        ...

    @property
    def conditions(self) -> Mapping[str, str]:
        """Describe what determines the vectors apart from weights and prompts: number type,
        lengths, width, context. Scores are compared only where it is the same.
        """
        ...

    def load(self, device: str) -> EmbedTexts:
        """Load the model on the device and return its embedding function.

        Raises:
            ArtifactError: the weights are others than those that the spec was made of, or broken.
        """
        ...


@dataclass(frozen=True)
class ModelLoader:
    """Table entry for a function that loads models which rayembed itself cannot load."""

    takes: Callable[[str], bool]
    """Whether this loader handles a model reference."""
    spec: str
    """Import string `module:name` of a function from a `ModelUnderTest` to a `ModelSpec`, with `on`
    as in `make_spec`."""
    names_others: bool = False
    """Whether a reference names other models; the function then also takes `tracking_uri`."""


LOADERS = NamedTable("rayembed.model_loaders", ModelLoader, "loader of models", {})
"""Loaders by name, all by entry points; what none of them takes, rayembed loads itself."""


class PromptedSpec:
    """Base class for specs of models that rayembed loads; it finds the prompt for every task."""

    prompts: ModelPrompts

    def encode_spec(
        self, task_metadata: "TaskMetadata", prompt_type: "PromptType | None"
    ) -> EncodeSpec:
        """Return the encode spec with role and prompt; texts of symmetric tasks count as
        queries.
        """
        instruction = self.prompts.instruction(task_metadata, prompt_type)
        return EncodeSpec(role_of(prompt_type), instruction)

    def shown(self, encode_spec: EncodeSpec) -> str:
        """Literal prompt, with the instruction inserted into its template."""
        return self.prompts.shown(encode_spec.instruction)


def check_same_weights(reference: str, folder: Path, weights: str) -> None:
    """Raise ArtifactError if the folder's weights have changed since the evaluation began."""
    if (seen := weights_fingerprint(folder)) != weights:
        raise ArtifactError(
            f"the model {reference!r} has weights {seen} on this machine, but the evaluation began "
            f"with {weights}; give all machines the same model files and start again"
        )


def stored_conditions(stored: StoredVectors) -> dict[str, str]:
    """Describe the number type and rescoring of a search in compressed vectors; empty for
    float32.
    """
    told: dict[str, str] = {}
    if stored.precision != "float32":
        told["precision"] = stored.precision
    if stored.rescore is not None:
        told["rescored"] = f"{stored.rescore.candidates} with {stored.rescore.precision}"
    return told


def check_stored(stored: StoredVectors, similarity: Similarity, reference: str) -> None:
    """Check that the model's vectors can be searched in the configured number type.

    Raises:
        ConfigError: vectors that are no directions, or FAISS is missing.
    """
    if stored.precision == "float32":
        return
    if similarity != "cosine":
        raise ConfigError(
            f"precision = {stored.precision!r} needs vectors that are compared by their cosine, "
            f"but {reference!r} compares them by {similarity}; leave precision out"
        )
    if stored.precision == "binary":
        require_faiss("searches in bits")


@runtime_checkable
class ContextualSpec(Protocol):
    """Protocol of specs of models that embed a task's texts in the context of its corpus."""

    @property
    def num_context(self) -> int:
        """Maximum number of context documents; 0 for a model that does not use the task's
        corpus.
        """
        ...

    @property
    def context_seed(self) -> int:
        """Seed for sampling the context documents."""
        ...


def model_meta(name: str, revision: str, **known: Any) -> "ModelMeta":
    """Make mteb's metadata of a model; a name without an organisation gets the prefix
    `rayembed/`.

    The name and the revision are what mteb finds results by, so both must tell models apart.
    """
    from mteb.models import ModelMeta

    fields = ModelMeta.model_fields.items()
    unknown = dict.fromkeys(name for name, field in fields if field.is_required())
    stated = {
        "name": name if "/" in name else f"rayembed/{name}",
        "revision": revision,
        "languages": ["eng-Latn"],
        "open_weights": True,
        "framework": ["PyTorch"],
        "use_instructions": False,
    }
    return ModelMeta(**{**unknown, **stated, **known})
