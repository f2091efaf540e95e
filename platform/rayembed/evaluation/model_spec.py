"""Specs of models under evaluation: picklable descriptions from which workers load a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from rayembed.config.small_vectors import StoredVectors
from rayembed.config.table import NamedTable
from rayembed.config.types import Role
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
    """Everything that decides a text's vector apart from the text and the model.

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
    """A loaded contextual model: an `EmbedTexts` for encode specs that name a context."""

    def __call__(self, texts: Sequence[str], encode_spec: EncodeSpec) -> np.ndarray:
        """Embed texts as `EmbedTexts` does, in the context that the encode spec names."""
        ...

    def learn(self, name: str, documents: Callable[[], Sequence[str]]) -> None:
        """Embed the documents of a context, unless the one of that name is known.

        Args:
            documents: gives them when they are needed.
        """
        ...


Similarity = Literal["cosine", "dot"]


class ModelSpec(Protocol):
    """Protocol of a picklable description of a model; only `load` needs the weights in memory."""

    @property
    def meta(self) -> "ModelMeta":
        """Metadata for mteb; results are stored under its name and revision.

        Two models that could give a text other vectors, or that put other prompts before it, never
        share both.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """Fingerprint of everything that decides a text's vector apart from the text and its encode
        spec.
        """
        ...

    @property
    def similarity(self) -> Similarity:
        """Similarity of vectors, which need not be of unit length: cosine normalises itself."""
        ...

    @property
    def stored(self) -> StoredVectors:
        """Number type in which a search holds the vectors, and their rescoring; `load` always
        returns float32.
        """
        ...

    def encode_spec(
        self, task_metadata: "TaskMetadata", prompt_type: "PromptType | None"
    ) -> EncodeSpec:
        """Return the encode spec of the task's texts of this prompt type (None: of symmetric
        tasks).
        """
        ...

    def shown(self, encode_spec: EncodeSpec) -> str:
        """Prompt before a text of this encode spec, in readable form."""
        ...

    @property
    def conditions(self) -> Mapping[str, str]:
        """Readable conditions that decide the vectors apart from weights and prompts: number type,
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
    """Entry for a loader of models that rayembed does not load itself."""

    takes: Callable[[str], bool]
    """Whether this loader handles a model reference."""
    spec: str
    """Import string `module:name` of a function from a `ModelUnderTest` to a `ModelSpec`, with `on`
    as in `make_spec`."""


LOADERS = NamedTable("rayembed.model_loaders", ModelLoader, "loader of models", {})
"""Loaders by name, all by entry points; what none of them takes, rayembed loads itself."""


class PromptedSpec:
    """Base class for specs of models that rayembed loads, with a prompt for every task."""

    prompts: ModelPrompts

    def encode_spec(
        self, task_metadata: "TaskMetadata", prompt_type: "PromptType | None"
    ) -> EncodeSpec:
        """Return role and prompt: texts of symmetric tasks are queries, and tasks with the same
        prompts share an encode spec.
        """
        instruction = self.prompts.instruction(task_metadata, prompt_type)
        return EncodeSpec(role_of(prompt_type), instruction)

    def shown(self, encode_spec: EncodeSpec) -> str:
        """The literal prompt, with the instruction filled into its template."""
        return self.prompts.shown(encode_spec.instruction)


def check_same_weights(reference: str, folder: Path, weights: str) -> None:
    """Raise ArtifactError unless the folder's weights are the weights at the start of the
    evaluation.
    """
    if (seen := weights_fingerprint(folder)) != weights:
        raise ArtifactError(
            f"the model {reference!r} has weights {seen} on this machine, but the evaluation began "
            f"with {weights}; give all machines the same and start again"
        )


def stored_conditions(stored: StoredVectors) -> dict[str, str]:
    """Readable number type and rescoring of a search in compressed vectors; empty for float32."""
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
            f"precision = {stored.precision!r} is for vectors that are compared by their cosine, "
            f"and {reference!r} compares them by {similarity}; leave precision out"
        )
    if stored.precision == "binary":
        require_faiss("searches in bits")


@runtime_checkable
class ContextualSpec(Protocol):
    """Protocol of specs of models that embed a task's texts in the context of its corpus."""

    @property
    def num_context(self) -> int:
        """Maximum documents of a context; 0: the model does not use the task's corpus."""
        ...

    @property
    def context_seed(self) -> int:
        """Seed for sampling the context documents."""
        ...


def model_meta(name: str, revision: str, **known: Any) -> "ModelMeta":
    """Make mteb's metadata of a model; names without an organisation get `rayembed/`.

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
