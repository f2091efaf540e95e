"""Specs of evaluated models that rayembed loads: its own, NV-Embed as published, and encoder
folders.
"""

import copy
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rayembed.assets.folder_formats import stated_format
from rayembed.config.document import fingerprint
from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.model import ModelConfig
from rayembed.config.types import Role, StoredVectors
from rayembed.display.quiet import without
from rayembed.errors import ArtifactError, ConfigError
from rayembed.evaluation.model_spec import (
    SCORES,
    EmbedTexts,
    EncodeSpec,
    PromptedSpec,
    Similarity,
    check_same_weights,
    check_stored,
    model_meta,
    stored_conditions,
)
from rayembed.evaluation.prompts import ModelPrompts, folder_prompts
from rayembed.evaluation.training_data import UNKNOWN, TrainingData, training_data
from rayembed.machine.hardware import Precision
from rayembed.models.contract import EmbeddingModel, Tokenizer, Tokens
from rayembed.models.loading.files import check_weight_files, count_parameters, weights_fingerprint
from rayembed.models.loading.load import check_loadable, computed_dtype, load_model, saved_widths
from rayembed.models.passes.encoding import encode, encode_context
from rayembed.models.saving.export import read_compression
from rayembed.models.tokens import PrefixTokenizer
from rayembed.models.versions import VECTORS
from rayembed.registry.registered_model import find_folder, pinned_reference

if TYPE_CHECKING:
    from mteb.models import ModelMeta

logger = logging.getLogger(__name__)

MAX_LENGTH = 512
"""Tokens of a text where settings say nothing: NV-Embed, appendix C, and the papers that compare
with it."""


@dataclass(frozen=True)
class RayembedSpec(PromptedSpec):
    """Spec of a model that rayembed loads; its vectors always have unit length."""

    settings: ModelUnderTest
    reference: str
    """Reference as in the settings, an alias of the registry replaced by its version of now."""
    tracking_uri: str | None
    """MLflow's, for registered models."""
    name: str
    weights: str
    """Fingerprint of weights, tokenizer and settings of the folder."""
    dimensions: int
    """Dimensions of the returned vectors."""
    max_lengths: tuple[tuple[Role, int], ...]
    prompts: ModelPrompts
    num_parameters: int | None
    places: int = 0
    """Documents that the model's context holds; 0: it takes none."""
    training: TrainingData = UNKNOWN
    """What mteb's metadata declare of its training; decides no score."""

    @property
    def num_context(self) -> int:
        """Number of context documents from a task's corpus; 0 if the settings choose another
        context.
        """
        return self.places if self.settings.context == "corpus" else 0

    @property
    def context_seed(self) -> int:
        """Seed for sampling the context documents."""
        return self.settings.context_seed

    @property
    def meta(self) -> "ModelMeta":
        """Metadata for mteb, with the revision `<weights>-<hash of everything else that could
        change a score>`.

        That of cut vectors begins with `first256-`, that of small ones with `int8-` or `binary1-`,
        that without context with `context0-`, so that scores of the model as it is are found by how
        their revision begins.
        """
        decided = fingerprint([self.fingerprint, self.prompts.fingerprint, SCORES])
        changed = "" if self.settings.dimensions is None else f"first{self.dimensions}-"
        changed += self.stored.slug
        if self.places and self.settings.context == "none":
            changed += "context0-"
        return model_meta(
            self.name,
            f"{changed}{self.weights}-{decided[:8]}",
            n_parameters=self.num_parameters,
            embed_dim=self.dimensions,
            max_tokens=max(length for _, length in self.max_lengths),
            similarity_fn_name="cosine",
            use_instructions=self.prompts.folder.template is not None,
            training_datasets=None if self.training.tasks is None else {*self.training.tasks},
            adapted_from=self.training.base,
        )

    @property
    def fingerprint(self) -> str:
        """Fingerprint of everything that changes the vectors: weights, number type, lengths, width,
        context settings, version of the computation.

        Prompts and the documents of a context stand in the encode spec.
        """
        decides = [self.weights, self.settings.dtype, dict(self.max_lengths), self.dimensions]
        decides.append(VECTORS)
        if self.places:
            decides += [self.settings.context, self.settings.context_seed]
        return fingerprint(decides)

    @property
    def similarity(self) -> Similarity:
        """Name of the similarity, always `cosine`, since all vectors have unit length."""
        return "cosine"

    @property
    def stored(self) -> StoredVectors:
        """Number type and rescoring of the search, as configured."""
        return self.settings.stored

    @property
    def conditions(self) -> dict[str, str]:
        """Describe the settings that scores depend on: number types, maximum lengths, vector width,
        and context.
        """
        found = {"dtype": self.settings.dtype, "dimensions": str(self.dimensions)}
        found |= {f"{role}_max_length": str(length) for role, length in self.max_lengths}
        found |= stored_conditions(self.stored)
        return found | ({"context": self.settings.context} if self.places else {})

    def load(self, device: str) -> EmbedTexts:
        """Load the model on the device.

        Raises:
            ArtifactError: the folder holds other weights than on the machine that made the spec.
            AssetError: the reference leads nowhere on this machine.
        """
        folder = find_folder(self.reference, self.tracking_uri)
        check_same_weights(self.reference, folder, self.weights)
        asked = self.settings.dtype
        assert asked != "auto"  # settled once, by `rayembed_spec`
        if asked == "saved":
            dtype = computed_dtype(folder, asked)
        else:
            dtype = "float32" if asked == "tf32" else asked
        # transformers takes it along for assisted generation: a sixth of a worker's imports.
        with without("sklearn"):
            model: Any = load_model(folder, dtype=dtype, device=device)
        model.tokenizer.max_lengths = dict(self.max_lengths)
        if self.places and self.settings.context != "random":
            # A saved corpus is not the task's, and what was asked for needs no warning.
            model.set_corpus(model.no_context())
        if self.places and self.settings.context == "random" and model.corpus is None:
            raise ArtifactError(
                f"model.context is 'random', but the model {self.reference!r} has no corpus saved "
                "with it; set its corpus to documents of its training data, with `rayembed corpus`"
            )
        literal, plain = with_literal_prompts(model), model.tokenizer
        return RayembedEncoder(literal, plain, self.dimensions, self.settings.tokens_per_batch)


class RayembedEncoder:
    """Embedding function of a loaded model; embeddings of recently used contexts are cached."""

    def __init__(
        self, model: Any, plain: Tokenizer, dimensions: int, tokens_per_batch: int | None = None
    ) -> None:
        """Wrap a loaded model.

        Args:
            plain: tokenizer of context documents, which have the prefix of their training whatever
                stands before a task's texts.
            dimensions: of the vectors that come out.
            tokens_per_batch: as `encode` has it.
        """
        self._model, self._dimensions, self._tokens = model, dimensions, tokens_per_batch
        self._plain = plain
        self._contexts: OrderedDict[str, Tensor] = OrderedDict()

    def __call__(self, texts: Sequence[str], encode_spec: EncodeSpec) -> np.ndarray:
        """Embed the texts: (N, D) float32 vectors."""
        context = self._contexts[encode_spec.context] if encode_spec.context else None
        vectors = encode(
            self._model,
            texts,
            role=encode_spec.role,
            instruction=encode_spec.instruction,
            tokens_per_batch=self._tokens,
            allow_empty=True,
            context=context,
        )
        return cut(vectors, self._dimensions)

    def learn(self, name: str, documents: Callable[[], Sequence[str]]) -> None:
        """Embed the documents of a named context, unless this context is cached."""
        if name in self._contexts:
            self._contexts.move_to_end(name)
            return
        literal, self._model.tokenizer = self._model.tokenizer, self._plain
        try:
            vectors = encode_context(self._model, documents(), tokens_per_batch=self._tokens)
        finally:
            self._model.tokenizer = literal
        device = self._model.device
        self._contexts[name] = vectors.to(device)
        if len(self._contexts) > _CONTEXTS:
            self._contexts.popitem(last=False)


_CONTEXTS = 32
"""LRU size of per-task contexts; larger than the number of concurrent tasks."""


class LiteralPrompts:
    """Tokenizer whose instructions are whole literal prompts, which replace the folder's
    prefixes.
    """

    def __init__(self, tokenizer: PrefixTokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(
        self,
        texts: Sequence[str],
        role: Role,
        instructions: Sequence[str] | None = None,
        *,
        allow_empty: bool = False,
    ) -> list[Tokens]:
        """Tokenise each text after its literal prompt; see `Tokenizer`."""
        heads = instructions or [""] * len(texts)
        return self._tokenizer.with_prompts(texts, heads, role, allow_empty=allow_empty)

    def collate(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        """Make one padded micro-batch; see `Tokenizer`."""
        return self._tokenizer.collate(tokens)

    def pack(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        """Make one packed micro-batch; see `PackingTokenizer`."""
        return self._tokenizer.pack(tokens)


def with_literal_prompts(model: EmbeddingModel) -> Any:
    """Wrap the model so that `EncodeSpec.instruction` is the whole literal prompt; the weights are
    shared.
    """
    if not isinstance(model.tokenizer, PrefixTokenizer):
        return model
    literal: Any = copy.copy(model)
    literal.tokenizer = LiteralPrompts(model.tokenizer)
    return literal


def rayembed_spec(
    settings: ModelUnderTest,
    *,
    tracking_uri: str | None = None,
    on: Precision | str | None = None,
) -> RayembedSpec:
    """Make the spec of a folder that `load_model` accepts; weights are read only for their
    fingerprint.

    Arguments are those of `make_spec`.

    Raises:
        ArtifactError: the folder is incomplete, or holds no model that rayembed loads.
        AssetError: the reference leads nowhere.
        ConfigError: settings that do not fit the model.
    """
    if settings.revision is not None:
        raise ConfigError(
            f"revision = {settings.revision!r} applies only to models that mteb loads; give the "
            f"revision in the reference {settings.reference!r} instead (hf://org/name@revision, "
            "models:/name/3)"
        )
    reference = pinned_reference(settings.reference, tracking_uri)
    folder = find_folder(reference, tracking_uri)
    config = check_loadable(folder)
    own_format = stated_format(folder)
    if own_format is not None:  # its number types are its own
        if settings.dtype not in ("auto", "saved"):
            logger.warning(
                "model.dtype=%s has no effect on %s: a model in the format %r computes in "
                "the number types that it was made with",
                *(settings.dtype, settings.reference, own_format),
            )
        settings = settings.model_copy(update={"dtype": "saved"})
    elif settings.dtype not in ("saved", "tf32"):
        dtype = computed_dtype(folder, settings.dtype, on)
        settings = settings.model_copy(update={"dtype": dtype})
    check_weight_files(folder)
    check_stored(settings.stored, "cosine", settings.reference)
    prompts = ModelPrompts(settings.prompts, folder_prompts(folder, config))
    return RayembedSpec(
        settings=settings,
        reference=reference,
        tracking_uri=tracking_uri,
        name=settings.name or name_of(settings.reference),
        weights=weights_fingerprint(folder),
        dimensions=_dimensions(settings, folder),
        max_lengths=lengths_read(config, settings.max_length),
        prompts=prompts,
        num_parameters=count_parameters(folder) if own_format is None else _counted(folder),
        places=config.context_places,
        training=training_data(settings.reference, folder),
    )


def _counted(folder: Path) -> int | None:
    """Number of parameters of the original model of a compressed folder; None for other folders."""
    told = read_compression(folder)
    return None if told is None else int(told["weights"])


def lengths_read(
    config: ModelConfig, max_length: int | None = None
) -> tuple[tuple[Role, int], ...]:
    """Maximum number of tokens of a text in an evaluation, by role.

    Args:
        max_length: what is asked for; None: 512, and room for examples before a query.
    """
    roles: tuple[Role, ...] = ("query", "document")
    asked = {role: max_length or _usual_length(config, role) for role in roles}
    return tuple((role, min(asked[role], config.max_lengths[role])) for role in roles)


def _usual_length(config: ModelConfig, role: Role) -> int:
    if config.example_tokens and role == "query":
        return max(MAX_LENGTH, config.query_max_length)
    return MAX_LENGTH


def name_of(reference: str) -> str:
    """Derive a model's `org/name` for results from its reference.

    A folder is called by its name; one called `model` or `export` by the folder that holds it.
    """
    path = reference.partition("?")[0].partition("@")[0].rstrip("/")
    if path.startswith("hf://"):
        parts = path.removeprefix("hf://").split("/")[:2]
        return "/".join(parts) if len(parts) == 2 else f"rayembed/{parts[0]}"
    if path.startswith("models:/"):
        return f"rayembed/{path.removeprefix('models:/').partition('/')[0]}"
    if path.startswith("pypi://"):
        return f"rayembed/{path.removeprefix('pypi://').partition('==')[0]}"
    if "://" not in path:
        path = str(Path(path).absolute())
    named = [part for part in path.split("/") if part and part not in ("model", "export")]
    return "rayembed/" + re.sub(r"[^A-Za-z0-9._-]+", "-", named[-1] if named else "model")


def cut(vectors: np.ndarray, dimensions: int) -> np.ndarray:
    """Truncate vectors to (N, dimensions), and renormalise them if components were dropped."""
    if dimensions >= vectors.shape[1]:
        return vectors
    kept = torch.from_numpy(np.ascontiguousarray(vectors[:, :dimensions]))
    unit: np.ndarray = torch.nn.functional.normalize(kept, dim=-1).numpy()
    return unit


def _dimensions(settings: ModelUnderTest, folder: Path) -> int:
    """Return the configured vector width, or by default the full one; raise if the model's vectors
    are narrower.

    Raises:
        ConfigError: wider than the model.
    """
    known = saved_widths(folder)
    asked = settings.dimensions
    if asked is None:
        return known[0]
    if asked > known[0]:
        raise ConfigError(
            f"dimensions = {asked} exceeds the vector width {known[0]} of the model "
            f"{settings.reference!r}; set dimensions to at most this width"
        )
    if asked not in known:
        logger.warning(
            "the model %s was not trained to have its vectors cut to %d of %d dimensions (it was "
            "trained for the widths %s); its scores will drop more than those of a model trained "
            "for this width",
            settings.reference,
            asked,
            known[0],
            ", ".join(map(str, known)),
        )
    return asked
