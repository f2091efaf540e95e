"""Describe a model folder that sentence-transformers loads and encodes with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder, get_prompt_name
from mteb.types import PromptType

from rayembed.assets.names import below
from rayembed.assets.resolver import resolve_model
from rayembed.assets.sentence_modules import (
    foreign_modules,
    is_own_format,
    no_pickled_objects,
)
from rayembed.config.document import fingerprint
from rayembed.config.evaluation import ModelUnderTest, Prompts
from rayembed.config.types import StoredVectors
from rayembed.errors import ArtifactError, ConfigError
from rayembed.evaluation.model_spec import (
    SCORES,
    EmbedTexts,
    EncodeSpec,
    Similarity,
    check_same_weights,
    check_stored,
    model_meta,
    stored_conditions,
)
from rayembed.evaluation.prompts import role_of
from rayembed.evaluation.rayembed_spec import name_of
from rayembed.machine.hardware import Precision, ran_out, settled, wide_enough
from rayembed.models.loading.backbones import check_for_sentence_transformers
from rayembed.models.loading.files import (
    check_weight_files,
    count_parameters,
    read_json,
    read_json_value,
    weights_fingerprint,
)
from rayembed.models.loading.load import saved_dtype
from rayembed.models.loading.saved_prompts import sentence_settings
from rayembed.models.loading.sentence_folder import stated_dtype
from rayembed.models.passes.fitting import first_line, no_room, room_for, say_fewer
from rayembed.models.versions import VECTORS

BATCH_SIZE = 32
"""Texts of one forward pass: the default of sentence-transformers and of mteb."""

_OTHER_KINDS = {
    "CrossEncoder": "cross-encoder, which scores pairs",
    "SparseEncoder": "sparse encoder, whose vectors have one dimension for each word",
    "MultiVectorEncoder": "multi-vector encoder, which gives a vector for each token",
    "ColBERT": "multi-vector encoder, which gives a vector for each token",
}


class WrappedSpec:
    """Base class of models under evaluation that other libraries load and encode with."""

    settings: ModelUnderTest

    @property
    def stored(self) -> StoredVectors:
        """Number type and rescoring of stored vectors in searches, from the settings."""
        return self.settings.stored

    @property
    def conditions(self) -> dict[str, str]:
        """Number type, maximum length and dimensions that the user set; unset ones read `as
        loaded`.
        """
        given = self.settings.model_dump(include={"dtype", "max_length", "dimensions"})
        chosen = {
            name: "as loaded" if value is None else str(value) for name, value in given.items()
        }
        return chosen | stored_conditions(self.stored)


@dataclass(frozen=True)
class SentenceSpec(WrappedSpec):
    """A model under evaluation that embeds as `mteb.evaluate` does with a `SentenceTransformer`:
    same prompts, same batches.
    """

    settings: ModelUnderTest
    reference: str
    name: str
    weights: str
    prompts: tuple[tuple[str, str], ...]
    """The folder's prompts that mteb uses, by name."""
    default_prompt: str
    similarity: Similarity
    num_parameters: int | None

    @property
    def meta(self) -> ModelMeta:
        """Metadata for mteb: the name, and a revision `<weights>-<fingerprint of other settings
        that affect scores>`.
        """
        return model_meta(
            self.name,
            f"{self.stored.slug}{self.weights}-{fingerprint([self.fingerprint, SCORES])[:8]}",
            n_parameters=self.num_parameters,
            framework=["Sentence Transformers", "PyTorch"],
            similarity_fn_name=self.similarity,
            use_instructions=any(text for _, text in self.prompts),
        )

    @property
    def fingerprint(self) -> str:
        """Fingerprint of everything that decides vectors: weights, settings and the version
        `VECTORS`.
        """
        decided = [self.settings.dtype, self.settings.max_length, self.settings.dimensions]
        return fingerprint([self.weights, "sentence-transformers", VECTORS, *decided])

    def encode_spec(
        self, task_metadata: TaskMetadata, prompt_type: PromptType | None
    ) -> EncodeSpec:
        """Choose the prompt and the encoding method as mteb's wrapper does."""
        prompts = dict(self.prompts)
        name = get_prompt_name(prompts, task_metadata, prompt_type)
        return EncodeSpec(
            role_of(prompt_type),
            prompts[name] if name else self.default_prompt,
            prompt_type=prompt_type.value if prompt_type else "",
        )

    def shown(self, encode_spec: EncodeSpec) -> str:
        """Return the literal prompt, for display."""
        return encode_spec.instruction

    def load(self, device: str) -> EmbedTexts:
        """Load the model on a device.

        Raises:
            ArtifactError: the folder holds other weights than on the machine that made the spec.
        """
        from sentence_transformers import SentenceTransformer

        from rayembed.models.sentence_module import as_sentence_transformer

        folder = resolve_model(self.reference)
        check_same_weights(self.reference, folder, self.weights)
        width = self.settings.dimensions
        if is_own_format(folder):
            # Else it would be widened by this machine, whatever the spec was settled to.
            dtype = saved_dtype(folder)
            model = as_sentence_transformer(folder, device=device, truncate_dim=width, dtype=dtype)
        else:
            with no_pickled_objects(folder), room_for(f"the model {self.reference!r}"):
                model = SentenceTransformer(str(folder), device=device, truncate_dim=width)
        adjust(model, self.settings)
        encode = {
            "": model.encode,
            "query": model.encode_query,
            "document": model.encode_document,
        }

        def embed(texts: Sequence[str], encode_spec: EncodeSpec, number: int) -> Any:
            return encode[encode_spec.prompt_type](
                list(texts),
                prompt=encode_spec.instruction,
                batch_size=number,
                show_progress_bar=False,
            )

        return in_batches(embed)


def sentence_spec(settings: ModelUnderTest, *, on: Precision | str | None = None) -> SentenceSpec:
    """Make the description of a model named by `st:` and a folder's reference; arguments as in
    `make_spec`.

    Raises:
        ArtifactError: an incomplete folder, or one that gives no single dense vector for a text.
        AssetError: the reference leads nowhere.
        ConfigError: settings that sentence-transformers does not take here.
    """
    reference = settings.reference.removeprefix("st:")
    refuse_for_others(settings, "sentence-transformers encodes by itself")
    if settings.revision is not None:
        raise ConfigError(
            f"revision = {settings.revision!r} has an effect only for models that mteb loads; "
            "write the revision into the reference, as in st:hf://org/name@revision"
        )
    folder = resolve_model(reference)
    check_weight_files(folder)
    check_for_sentence_transformers(folder)
    stated = sentence_settings(folder)
    _check_dense(folder, stated)
    if foreign := foreign_modules(folder):
        raise ArtifactError(
            f"{str(folder)!r} names the modules {foreign} of its own code, which is never run; "
            "name a folder or an hf:// reference of a model that rayembed loads"
        )
    similarity: Any = stated.get("similarity_fn_name") or "cosine"
    if similarity not in get_args(Similarity):
        raise ArtifactError(
            f"{str(folder)!r} compares vectors by {similarity!r}; supported are cosine and dot"
        )
    check_stored(settings.stored, similarity, settings.reference)
    settings = _settled(settings, folder, on)
    # sentence-transformers fills these two in, so that it never heeds a prompt named `passage`.
    prompts = {"query": "", "document": ""} | (stated.get("prompts") or {})
    kept, _ = AbsEncoder.validate_task_to_prompt_name(prompts, raise_for_invalid_keys=False)
    default = stated.get("default_prompt_name")
    return SentenceSpec(
        settings=settings,
        reference=reference,
        name=settings.name or name_of(reference),
        weights=weights_fingerprint(folder),
        prompts=tuple((name, text or "") for name, text in (kept or {}).items()),
        default_prompt=prompts.get(default) or "" if default else "",
        similarity=similarity,
        num_parameters=count_parameters(folder),
    )


def _settled(settings: ModelUnderTest, folder: Path, on: Precision | str | None) -> ModelUnderTest:
    """Replace the number type `auto` by a fixed one where machines would choose differently."""
    if settings.dtype == "bfloat16":
        settled(settings.dtype, on)  # for its warning
    if settings.dtype != "auto" or not _in_bfloat16(folder):
        return settings
    kept = wide_enough("bfloat16", on) == "bfloat16"
    return settings.model_copy(update={"dtype": "saved" if kept else "float32"})


def _in_bfloat16(folder: Path) -> bool:
    """Whether sentence-transformers treats a module's weights as bfloat16."""
    if is_own_format(folder):
        return saved_dtype(folder) == "bfloat16"
    places = [folder]
    if (folder / "modules.json").is_file():
        listed = str(folder / "modules.json")
        named = [m.get("path") for m in read_json_value(folder / "modules.json")]
        places = [below(folder, path, repr(listed)) if path else folder for path in named]
    stating = (place for place in places if (place / "config.json").is_file())
    return any(stated_dtype(place) == "bfloat16" for place in stating)


def refuse_for_others(settings: ModelUnderTest, why: str) -> None:
    """Raise if settings are given that only rayembed's own models accept.

    Raises:
        ConfigError: prompts or a token budget are set.
    """
    for name, default in (("prompts", Prompts()), ("tokens_per_batch", None)):
        if getattr(settings, name) != default:
            raise ConfigError(
                f"{name} is set for the model {settings.reference!r}, but {why}; leave {name} "
                "out, or name the model's folder or hf:// reference to load the model with "
                "rayembed"
            )


def adjust(model: Any, settings: ModelUnderTest) -> None:
    """Set number type and maximum length of a loaded `SentenceTransformer`, in place.

    The types `auto` and `saved` leave it as it was loaded.
    """
    import torch

    if settings.dtype not in ("auto", "saved"):
        model.to(torch.float32 if settings.dtype == "tf32" else getattr(torch, settings.dtype))
    if settings.max_length is not None:
        own = model.max_seq_length
        model.max_seq_length = settings.max_length if own is None else min(settings.max_length, own)


class TextsAtOnce:
    """Batch size with which a library embeds texts, halved whenever memory runs out."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, work: Callable[[int], Any]) -> Any:
        """Call `work` with the batch size; halve it and repeat until memory suffices.

        Raises:
            DeviceMemoryError: memory does not suffice for one text.
        """
        while True:
            try:
                return work(self.number)
            except RuntimeError as error:
                if not ran_out(error):
                    raise
                says = first_line(error)
            before, self.number = self.number, self.number // 2
            if not self.number:
                self.number = 1
                raise no_room("one text", "lower its max_length", says)
            say_fewer(f"{before:,} texts", f"{self.number:,}", says)


def in_batches(embed: Callable[[Sequence[str], EncodeSpec, int], Any]) -> EmbedTexts:
    """Wrap a library's encoding function so that its batch size is halved whenever memory
    runs out.
    """
    at_once = TextsAtOnce(BATCH_SIZE)
    return lambda texts, spec: as_vectors(at_once(partial(embed, texts, spec)))


def as_vectors(embeddings: Any) -> np.ndarray:
    """Convert an encoder's output, an array or a tensor, to (N, D) float32.

    Raises:
        ArtifactError: not one dense vector for each text.
    """
    import torch

    if isinstance(embeddings, list) and embeddings and isinstance(embeddings[0], torch.Tensor):
        if len({one.shape for one in embeddings}) > 1:
            raise ArtifactError(
                "the model gives several vectors for a text, which is not supported; supported is "
                "one vector for each text"
            )
        embeddings = torch.stack(embeddings)
    if isinstance(embeddings, torch.Tensor):
        if embeddings.is_sparse:
            raise ArtifactError(
                "the model gives sparse vectors, which are not supported; use a model with dense "
                "vectors"
            )
        embeddings = embeddings.detach().float().cpu().numpy()
    vectors = np.asarray(embeddings, dtype=np.float32)
    if vectors.ndim != 2:
        raise ArtifactError(
            f"the model gives arrays of shape {vectors.shape} for texts, which is not supported; "
            "supported is one dense vector for each text"
        )
    return vectors


def _check_dense(folder: Path, stated: dict[str, Any]) -> None:
    kind = str(stated.get("model_type", ""))
    if kind not in _OTHER_KINDS and (folder / "modules.json").is_file():
        types = " ".join(str(m.get("type")) for m in read_json_value(folder / "modules.json"))
        kind = "SparseEncoder" if "sparse_encoder" in types else ""
        kind = "MultiVectorEncoder" if "multi_vec_encoder" in types else kind
    elif kind not in _OTHER_KINDS:
        architectures = read_json(folder / "config.json").get("architectures") or []
        scores = any(str(a).endswith("ForSequenceClassification") for a in architectures)
        kind = "CrossEncoder" if scores else ""
    if kind in _OTHER_KINDS:
        raise ArtifactError(
            f"{str(folder)!r} is a {_OTHER_KINDS[kind]}, which is not supported; supported are "
            "models that give one dense vector for each text"
        )
