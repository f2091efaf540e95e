"""Describe a model that mteb loads with its own wrapper and prompts, for comparison with other
models.
"""

import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mteb
from mteb.abstasks.abstask import get_abstask_prompt
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models import ModelMeta, SentenceTransformerEncoderWrapper
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_implementations import MODEL_REGISTRY
from mteb.types import PromptType

from rayembed.config.document import fingerprint
from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.settings import nearest
from rayembed.errors import AssetError, ConfigError
from rayembed.evaluation.model_spec import (
    SCORES,
    EmbedTexts,
    EncodeSpec,
    Similarity,
    check_stored,
)
from rayembed.evaluation.own_set import remember_prompt
from rayembed.evaluation.prompts import role_of
from rayembed.machine.hardware import Precision, settled
from rayembed.models.passes.fitting import room_for
from rayembed.models.versions import VECTORS
from rayembed_extras.peers.loader_code import GIVES_LEAVE, foreign_code, gives_leave
from rayembed_extras.peers.sentence_spec import (
    SentenceSpec,
    WrappedSpec,
    adjust,
    in_batches,
    refuse_for_others,
    sentence_spec,
)

logger = logging.getLogger(__name__)

_MORE_THAN_TEXTS: Mapping[str, str] = {
    "CDEWrapper": "samples its context from the task's data set by split and subset",
    "EmbeddingGemma2Wrapper": "reads titles apart from the documents' texts",
    "GeeVecLiteModel": "reads the subset of the task",
    "GeeVecAPIModel": "reads the subset of the task",
    "GoogleGeminiEmbeddingModel": "reads titles apart from the documents' texts",
}
"""mteb's wrappers that need more than a text, its task and its role."""


@dataclass(frozen=True)
class MtebSpec(WrappedSpec):
    """A model under evaluation that embeds with mteb's wrapper, which gets the task's metadata and
    prompt type.
    """

    settings: ModelUnderTest
    model: str
    """Name of the model in mteb and on the hub."""

    @property
    def stated(self) -> ModelMeta:
        """Mteb's own metadata of the model, with the revision and the loader."""
        # Looked up in each process: some of mteb's loaders cannot be pickled.
        return mteb.get_model_meta(self.model)

    @property
    def meta(self) -> ModelMeta:
        """Metadata from mteb, with a revision that also identifies the settings and the versions
        `VECTORS` and `SCORES`.
        """
        decided = fingerprint([self._changes(), VECTORS, SCORES])
        name = self.settings.name
        update = {"revision": f"{self.stated.revision}-{self.stored.slug}{decided[:8]}"}
        if name:
            update["name"] = name if "/" in name else f"rayembed/{name}"
        return self.stated.model_copy(update=update)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of everything that decides vectors: name, revision, settings and the version
        `VECTORS`.
        """
        decided = [self.model, self.stated.revision, self._changes(), VECTORS]
        return fingerprint(decided)

    @property
    def similarity(self) -> Similarity:
        """Similarity function from mteb's metadata; cosine if the metadata names none."""
        name = self.stated.similarity_fn_name
        return "dot" if name is not None and name.value == "dot" else "cosine"

    def encode_spec(
        self, task_metadata: TaskMetadata, prompt_type: PromptType | None
    ) -> EncodeSpec:
        """Pass on the task itself instead of a prompt, because only mteb's wrapper knows the
        prompt.
        """
        return EncodeSpec(
            role_of(prompt_type),
            task=task_text(task_metadata),
            prompt_type=prompt_type.value if prompt_type else "",
        )

    def shown(self, encode_spec: EncodeSpec) -> str:
        """Text displayed in place of a prompt: the name of mteb's wrapper, since only the wrapper
        knows the prompt.
        """
        return f"(as mteb's {_loader_name(self.stated)} has it)"

    def load(self, device: str) -> EmbedTexts:
        """Load the model in mteb's wrapper on a device.

        Raises:
            ConfigError: it takes a setting not, or gives not one dense vector for each text.
        """
        options: dict[str, Any] = {}
        if self.settings.dimensions is not None:
            options["embed_dim"] = self.settings.dimensions
        with room_for(f"the model {self.model!r}"):
            wrapper: Any = self.stated.load_model(device=device, **options)
        if not hasattr(wrapper, "encode"):
            raise ConfigError(
                f"mteb's {type(wrapper).__name__} of {self.model!r} does not embed texts; "
                "supported are models that give one dense vector for each text"
            )
        if self._changes(but=("dimensions",)):
            _adjust(wrapper, self.settings)

        def embed(texts: Sequence[str], encode_spec: EncodeSpec, number: int) -> Any:
            side = encode_spec.prompt_type
            return wrapper.encode(
                _loader(texts, number),
                task_metadata=metadata_of(encode_spec.task),
                hf_split="test",
                hf_subset="default",
                prompt_type=PromptType(side) if side else None,
                batch_size=number,
                show_progress_bar=False,
            )

        return in_batches(embed)

    def _changes(self, but: tuple[str, ...] = ()) -> dict[str, Any]:
        """Collect the settings that make vectors differ from the vectors of mteb's own model."""
        given = {
            "dtype": None if self.settings.dtype in ("auto", "saved") else self.settings.dtype,
            "max_length": self.settings.max_length,
            "dimensions": self.settings.dimensions,
        }
        return {k: v for k, v in given.items() if v is not None and k not in but}


def mteb_spec(
    settings: ModelUnderTest, *, on: Precision | str | None = None
) -> MtebSpec | SentenceSpec:
    """Make the description of a model that mteb knows; arguments as in `make_spec`.

    What mteb does not know is taken for a model of the hub that sentence-transformers loads, as
    mteb takes it.

    Raises:
        ArtifactError: the hub's model gives no single dense vector for a text.
        AssetError: neither has it; the message names mteb's nearest.
        ConfigError: a kind of model or a setting that is not supported.
    """
    name = settings.reference.removeprefix("mteb:")
    try:
        stated = mteb.get_model_meta(name)
    except KeyError:
        return _of_hub(settings, name, on)
    refuse_for_others(settings, "mteb's wrapper uses its own setting")
    if settings.revision not in (None, stated.revision):
        raise ConfigError(
            f"revision = {settings.revision!r}: mteb loads {name!r} in the revision "
            f"{stated.revision!r} only; leave revision out, or name the weights "
            f"hf://{name}@{settings.revision} to use another revision"
        )
    _check_supported(name, stated)
    allowed = stated.embed_dim if isinstance(stated.embed_dim, Sequence) else [stated.embed_dim]
    if settings.dimensions is not None and settings.dimensions not in allowed:
        raise ConfigError(
            f"dimensions = {settings.dimensions}: according to mteb, {name!r} gives vectors of "
            f"{list(allowed)} dimensions; choose from this list or leave dimensions out"
        )
    if settings.dtype == "bfloat16":
        settled(settings.dtype, on)  # for its warning
    spec = MtebSpec(settings, str(stated.name))
    check_stored(spec.stored, spec.similarity, name)
    return spec


def _of_hub(settings: ModelUnderTest, name: str, on: Precision | str | None) -> SentenceSpec:
    close = nearest(name, MODEL_REGISTRY)
    unknown = f"mteb has no model {name!r}" + (f"; {close}" if close.startswith("did") else "")
    if settings.reference.startswith("mteb:"):
        raise AssetError(f"{unknown} To load a model of the hub, leave 'mteb:' out")
    update = {
        "reference": f"st:hf://{name}@{settings.revision or 'main'}",
        "revision": None,
        "name": settings.name or name,
    }
    try:
        return sentence_spec(settings.model_copy(update=update), on=on)
    except AssetError as error:
        raise AssetError(
            f"there is no model {name!r}: no folder of this name exists here; {unknown}; the hub "
            f"says: {error}"
        ) from error


def _check_supported(name: str, meta: ModelMeta) -> None:
    """Check that the model returns one dense vector for a text and needs nothing else.

    Raises:
        ConfigError: it does not.
    """
    other = [kind for kind in meta.model_type if kind != "dense"]
    if other:
        raise ConfigError(
            f"{name!r} is a model of the kind {', '.join(other)}, which is not supported; "
            "supported are models that give one dense vector for each text"
        )
    if "text" not in meta.modalities:
        raise ConfigError(
            f"{name!r} embeds {', '.join(meta.modalities)} but no text; name a model for texts"
        )
    similarity = meta.similarity_fn_name
    if similarity is not None and similarity.value not in ("cosine", "dot"):
        raise ConfigError(
            f"{name!r} compares vectors by {similarity.value!r}; supported are cosine and dot"
        )
    loader = getattr(meta.loader, "func", meta.loader)
    reason = _MORE_THAN_TEXTS.get(_loader_name(meta))
    compared = getattr(loader, "similarity", AbsEncoder.similarity)
    known = (AbsEncoder.similarity, SentenceTransformerEncoderWrapper.similarity)
    if reason is None and inspect.isclass(loader) and compared not in known:
        reason = "compares vectors in its own way"
    if reason is not None:
        raise ConfigError(
            f"mteb's wrapper of {name!r} {reason}, which cannot be spread over workers; evaluate "
            "the model with mteb itself, or load its weights as a model of rayembed"
        )
    if (seen := _runs_code(meta)) is not None:
        raise ConfigError(
            f"mteb's loader of {name!r} {seen}, so rayembed does not use it; if rayembed supports "
            f"the architecture, name the weights instead: hf://{name}@{meta.revision or 'main'}"
        )


def _runs_code(meta: ModelMeta) -> str | None:
    """Describe how mteb's loader would run the model's own code; None if it does not."""
    loader = getattr(meta.loader, "func", meta.loader)
    options = [meta.loader_kwargs, getattr(meta.loader, "keywords", {})]
    if any(map(gives_leave, options)):
        return GIVES_LEAVE
    return None if loader is None else foreign_code(loader)


def _loader_name(meta: ModelMeta) -> str:
    loader = getattr(meta.loader, "func", meta.loader)
    return str(getattr(loader, "__name__", loader))


def _adjust(wrapper: Any, settings: ModelUnderTest) -> None:
    from sentence_transformers import SentenceTransformer

    model = getattr(wrapper, "model", None)
    if not isinstance(model, SentenceTransformer):
        raise ConfigError(
            f"dtype and max_length cannot be set for {settings.reference!r}, because mteb's "
            f"{type(wrapper).__name__} does not use a SentenceTransformer; leave dtype and "
            "max_length out"
        )
    adjust(model, settings)


def _loader(texts: Sequence[str], number: int) -> Any:
    """Make a data loader as mteb passes it to an encoder: batches with the column `text`."""
    from datasets import Dataset
    from torch.utils.data import DataLoader

    return DataLoader(Dataset.from_dict({"text": list(texts)}), batch_size=number)


def task_text(metadata: TaskMetadata) -> str:
    """Serialise task metadata: the name of a task that mteb has, otherwise JSON of the whole
    metadata.

    `metadata_of` turns both into the metadata in any process.
    """
    return _text(metadata.name, metadata.model_dump_json())


@lru_cache(maxsize=512)
def _text(name: str, values: str) -> str:
    try:
        known = mteb.get_task(name).metadata.model_dump_json()
    except KeyError:
        known = ""
    # A name may be mteb's and the task another: its own class, with other data or languages.
    if known == values:
        return name
    # The class may be unknown where the text is read, and mteb's wrappers ask it for a prompt.
    return json.dumps({"metadata": json.loads(values), "prompt": get_abstask_prompt(name)})


@lru_cache(maxsize=512)
def metadata_of(text: str) -> TaskMetadata:
    """Restore task metadata from the text that `task_text` made."""
    if not text.startswith("{"):
        return mteb.get_task(text).metadata
    values: dict[str, Any] = json.loads(text)
    metadata = TaskMetadata.model_validate(values["metadata"])
    remember_prompt(metadata, values["prompt"])
    return metadata
