"""Describe two models that are evaluated as one: the first embeds queries, the second documents."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rayembed.config.document import fingerprint
from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.types import Role, StoredVectors, expanded_name
from rayembed.errors import ArtifactError, ConfigError
from rayembed.evaluation.model_spec import (
    EmbedTexts,
    EncodeSpec,
    ModelSpec,
    Similarity,
    model_meta,
)
from rayembed.evaluation.rayembed_spec import RayembedSpec
from rayembed.evaluation.run_scores import make_spec
from rayembed.machine.hardware import Precision
from rayembed.models.loading.load import saved_widths
from rayembed.registry.registered_model import find_folder
from rayembed_extras.model_pairs.loader import parse_pair

if TYPE_CHECKING:
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.models import ModelMeta
    from mteb.types import PromptType


@dataclass(frozen=True)
class PairSpec:
    """Spec of two models with vectors in one space, each with its own prompts.

    Texts of symmetric tasks are queries, as in all evaluations, so the query model alone embeds
    them.
    """

    queries: ModelSpec
    documents: ModelSpec
    name: str

    @property
    def meta(self) -> "ModelMeta":
        """Metadata for mteb; the revision is `pair-<hash of both models' revisions>`."""
        both = self.queries.meta, self.documents.meta
        decided = fingerprint([str(meta.revision) for meta in both])
        sizes = [meta.n_parameters for meta in both]
        return model_meta(
            self.name,
            f"{self.stored.slug}pair-{decided}",
            n_parameters=None if None in sizes else sum(size or 0 for size in sizes),
            embed_dim=both[1].embed_dim,
            similarity_fn_name=self.similarity,
            use_instructions=any(meta.use_instructions for meta in both),
        )

    @property
    def fingerprint(self) -> str:
        """Fingerprint of both models' fingerprints."""
        return fingerprint(["pair", self.queries.fingerprint, self.documents.fingerprint])

    @property
    def similarity(self) -> Similarity:
        """Similarity of both models."""
        return self.documents.similarity

    @property
    def stored(self) -> StoredVectors:
        """Number type in which a search stores the documents' vectors."""
        return self.documents.stored

    @property
    def conditions(self) -> Mapping[str, str]:
        """Settings that both models have alike, and `queries / documents` where they differ."""
        sides = self.queries.conditions, self.documents.conditions
        found = {}
        for name in dict.fromkeys((*sides[0], *sides[1])):
            values = [side.get(name, "none") for side in sides]
            found[name] = values[0] if values[0] == values[1] else " / ".join(values)
        return found

    def encode_spec(
        self, task_metadata: "TaskMetadata", prompt_type: "PromptType | None"
    ) -> EncodeSpec:
        """Return the encode spec of the model that embeds the texts, with its own prompt."""
        side = self.documents if prompt_type == "document" else self.queries
        return side.encode_spec(task_metadata, prompt_type)

    def shown(self, encode_spec: EncodeSpec) -> str:
        """Literal prompt, as the model that embeds the texts has it."""
        side = self.documents if encode_spec.role == "document" else self.queries
        return side.shown(encode_spec)

    def load(self, device: str) -> EmbedTexts:
        """Load both models on the device.

        Raises:
            ArtifactError: as the models' own specs; or their vectors differ in width.
        """
        return PairEncoder(
            self.name,
            {"query": self.queries.load(device), "document": self.documents.load(device)},
        )


class PairEncoder:
    """Embedding function of two loaded models: each embeds texts of its role."""

    def __init__(self, name: str, models: Mapping[Role, EmbedTexts]) -> None:
        self._name, self._models = name, models
        self._widths: dict[Role, int] = {}

    def __call__(self, texts: Sequence[str], encode_spec: EncodeSpec) -> np.ndarray:
        """Embed texts: (N, D) float32 vectors.

        Raises:
            ArtifactError: queries and documents have vectors of different widths.
        """
        vectors = self._models[encode_spec.role](texts, encode_spec)
        self._widths[encode_spec.role] = vectors.shape[1]
        if len(set(self._widths.values())) > 1:
            raise ArtifactError(f"the pair {self._name}: {_widths(**self._widths)}")
        return vectors


def _widths(query: int, document: int) -> str:
    return (
        f"the query model's vectors have {query} dimensions and the document model's {document}; "
        "both must have the same width; if the query model was trained for the documents' width "
        f"(Matryoshka), set model.dimensions={document}"
    )


def pair_spec(
    settings: ModelUnderTest,
    *,
    tracking_uri: str | None = None,
    on: Precision | str | None = None,
) -> PairSpec:
    """Make the spec of `pair:QUERIES::DOCUMENTS`; arguments as in `make_spec`.

    Number type, length, width and stored type are those of both models; a prefix of queries is the
    first one's, a prefix of documents the second one's.

    Raises:
        ConfigError: no two references, or models that do not fit each other.
        RayembedError: as `make_spec`, of one of the models.
    """
    if settings.revision is not None:
        raise ConfigError(
            f"revision = {settings.revision!r} would be that of one model, but "
            f"{settings.reference!r} names two; write it into a reference (hf://org/name@revision, "
            "models:/name/3)"
        )
    specs = []
    others = {"document_prefix": None}, {"query_prefix": None}
    for reference, without in zip(parse_pair(settings.reference), others, strict=True):
        prompts = settings.prompts.model_copy(update=without)
        update = {"reference": expanded_name(reference), "name": None, "prompts": prompts}
        specs.append(
            make_spec(
                settings.model_copy(update=update),
                tracking_uri=tracking_uri,
                own_tasks=prompts.instructions,  # which are checked already
                on=on,
            )
        )
    queries, documents = specs
    return pair_of(queries, documents, settings.name)


def pair_of(
    queries: ModelSpec,
    documents: ModelSpec,
    name: str | None = None,
    *,
    learnt: Collection[int] = (),
) -> PairSpec:
    """Make the spec of two described models; a wider query model is cut to the documents' width if
    it was trained for it.

    Args:
        name: in results; None: made of both models' names.
        learnt: widths for which the query model was trained, besides those that its folder states.

    Raises:
        ConfigError: their vectors are compared differently or differ in width, or one of them needs
            a task's corpus.
    """
    if queries.similarity != documents.similarity:
        raise ConfigError(
            f"{queries.meta.name} compares vectors by {queries.similarity} and "
            f"{documents.meta.name} by {documents.similarity}; models of a pair must compare them "
            "alike"
        )
    for spec in (queries, documents):
        if getattr(spec, "num_context", 0):
            raise ConfigError(
                f"{spec.meta.name} embeds texts in the context of a task's corpus, which a pair of "
                "models does not have; set model.context=none"
            )
    name = name or f"{queries.meta.name}--{str(documents.meta.name).rpartition('/')[2]}"
    return PairSpec(_fitting(queries, documents, learnt), documents, name)


def _fitting(queries: ModelSpec, documents: ModelSpec, learnt: Collection[int]) -> ModelSpec:
    """Return the query model with vectors of the documents' width, as far as widths are stated."""
    if not isinstance(queries, RayembedSpec) or not isinstance(documents, RayembedSpec):
        return queries  # compared when they have embedded
    width = documents.dimensions
    if queries.dimensions == width:
        return queries
    stated = saved_widths(find_folder(queries.reference, queries.tracking_uri))
    if width > queries.dimensions or width not in {*stated, *learnt}:
        raise ConfigError(_widths(queries.dimensions, width))
    settings = queries.settings.model_copy(update={"dimensions": width})
    return replace(queries, settings=settings, dimensions=width)
