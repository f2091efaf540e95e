"""Load teachers: embedding models that stay loaded in their process and encode texts for data
preparation.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch

from rayembed.assets.resolver import resolve_model
from rayembed.config.backbone import Dtype, DtypeSetting
from rayembed.config.document import fingerprint
from rayembed.config.instructions import instruction_in
from rayembed.config.mining import Teacher
from rayembed.config.types import Role
from rayembed.display.progress import tell
from rayembed.errors import ArtifactError
from rayembed.machine.cores import free_threads, num_cores
from rayembed.machine.hardware import Precision, auto_precision, say_once, settled
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import load_as_saved, load_model
from rayembed.models.passes.encoding import encode
from rayembed.models.passes.fitting import room_for
from rayembed.models.tokens import PrefixTokenizer
from rayembed.models.versions import VECTORS, warn_of_other_versions

log = logging.getLogger(__name__)

Encoder = Callable[[Sequence[str], Role], np.ndarray]
"""Encodes N texts in a role: (N, D) float32 unit vectors."""


class _Typed(Protocol):
    """Protocol of model settings with a number type `dtype`."""

    @property
    def dtype(self) -> DtypeSetting: ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self: ...


TeacherSettings = TypeVar("TeacherSettings", bound=_Typed)
"""Settings of a teacher or a cross-encoder."""

_TOKENS_PER_BATCH_GPU = 65_536
_TOKENS_PER_BATCH_CPU = 4096
"""Tokens in a micro-batch on CPU. Larger batches exceed the cache: all-MiniLM-L6-v2 on two busy
cores encoded 115 texts/s with 4,096 padded tokens a micro-batch and 69 with 16,384."""


def load_teacher(
    config: Teacher,
    weights: str,
    device: str = "cpu",
    *,
    began: Mapping[str, str] | None = None,
) -> Encoder:
    """Load the teacher's encoder on `device`; a process loads it only once.

    Args:
        weights: their fingerprint. A process that lives on loads anew what lies under the same name
            with other content.
        began: versions of libraries where the job began; None: the same.

    Raises:
        ArtifactError: the weights are others.
    """
    warn_of_other_versions("other vectors of this job", began or {})
    prefixes = config.query_prefix, config.document_prefix
    dtype: Dtype = auto_precision(device).dtype if config.dtype == "auto" else config.dtype
    return _load(config.teacher, weights, config.max_length, *prefixes, device, dtype)


def release_teacher() -> None:
    """Release the teacher that this process keeps loaded."""
    _load.cache_clear()


def embedding_settings(config: Teacher, weights: str) -> str:
    """Hash all inputs that determine a text's vector: the settings and the fingerprint
    `weights`.
    """
    prefixes = config.query_prefix, config.document_prefix
    return fingerprint([VECTORS, weights, config.dtype, config.max_length, *prefixes])


def weights_of(reference: str) -> str:
    """Return the fingerprint of the weights of the model that a reference names."""
    return weights_fingerprint(resolve_model(reference))


@dataclass(frozen=True)
class TeacherLoader:
    """Functions by which preparation fingerprints and loads teachers; tests replace them."""

    load: Callable[[Teacher, str, str], Encoder] = load_teacher
    """Loads an encoder from settings, weights fingerprint and device."""
    fingerprint: Callable[[str], str] = weights_of
    precision: Callable[[], Precision] = auto_precision
    """Fast number type of the machines that embed; here a GPU's where there is one, as
    `execute_here` embeds on it."""

    def settled(self, config: TeacherSettings) -> TeacherSettings:
        """Copy settings with `auto` replaced by a fixed number type, so that all machines embed in
        the same type.

        Says once in a process what `auto` became, and warns of a bfloat16 that is emulated.
        """
        if config.dtype == "float32":
            return config
        return config.model_copy(update={"dtype": settled(config.dtype, self.precision())})


@lru_cache(maxsize=1)
def _load(
    reference: str,
    weights: str,
    max_length: int,
    query_prefix: str,
    document_prefix: str,
    device: str,
    dtype: Dtype,
) -> Encoder:
    """Load the encoder with linear layers in the given number type.

    Linear layers work in `dtype`. In bfloat16 everything between them (embeddings, norms, the
    residual stream) keeps the type of the saved weights: as fast as full bfloat16, with half the
    error. Cosines of all-MiniLM-L6-v2 are off by 4.7e-4 (standard deviation) instead of 8.5e-4; the
    rule's margin is 5 percent, but the last negatives often score closer than that to the next
    candidates. Weights saved in float16 are loaded in it and cast layer by layer: in float32 those
    of a 7B model would take 28 GB of memory first.
    """
    folder = resolve_model(reference)
    if (seen := weights_fingerprint(folder)) != weights:
        raise ArtifactError(
            f"the teacher {reference!r} has weights {seen} on this machine, but the job began "
            f"with {weights}; give all machines the same model and start the job again"
        )
    # Ray gives each of its processes one thread for each CPU that it reserves; the teacher runs
    # alone on its machine.
    take_free_threads("a teacher")
    halved = dtype == "bfloat16"
    model = load_as_saved(folder) if halved else load_model(folder, dtype=dtype)
    if halved:
        narrow_linear_layers(model)
    lengths = model.tokenizer.max_lengths
    model.tokenizer.max_lengths = {role: min(lengths[role], max_length) for role in lengths}
    with room_for(f"the teacher {reference!r}"):
        model.to(device)
    budget = _TOKENS_PER_BATCH_CPU if device == "cpu" else _TOKENS_PER_BATCH_GPU
    prefixes: dict[Role, str] = {"query": query_prefix, "document": document_prefix}
    if isinstance(model.tokenizer, PrefixTokenizer):
        # In place of the prefixes that the teacher's folder names, not before them.
        model.tokenizer.prefixes |= {role: text for role, text in prefixes.items() if text}
        prefixes = {"query": "", "document": ""}
    instructions: dict[Role, str] = {"query": "", "document": ""}
    for role, prefix in prefixes.items():
        # As an instruction its tokens stay out of the pool where the model keeps them out.
        template = model.tokenizer.prompt("{instruction}", role)
        if instruction := instruction_in(prefix, template):
            instructions[role], prefixes[role] = instruction, ""

    def encode_texts(texts: Sequence[str], role: Role) -> np.ndarray:
        def progress(done: int, count: int) -> None:
            tell(done / count)
            if done == count or done // 2048 != (done - 1) // 2048:
                log.debug("teacher: %d of %d %s texts are embedded", done, count, role)

        prefixed = [prefixes[role] + text for text in texts]
        # It casts what goes into linear layers and attention, and no weights: they are narrow.
        cast: Any = torch.autocast(torch.device(device).type, torch.bfloat16)
        with cast if halved else nullcontext():
            return encode(
                model,
                prefixed,
                role=role,
                instruction=instructions[role],
                tokens_per_batch=budget,
                progress=progress,
            )

    return encode_texts


def narrow_linear_layers(model: torch.nn.Module) -> None:
    """Cast the weights of linear layers to bfloat16, and other float16 weights to float32, in
    place.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.to(torch.bfloat16)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype == torch.float16:
            tensor.data = tensor.data.float()


def take_free_threads(what: str) -> None:
    """Let torch use as many threads as this machine has free cores.

    Args:
        what: computes, for the line that says that there are fewer.
    """
    cores, (threads, why) = num_cores(), free_threads(num_cores())
    if threads < cores:
        say_once(logging.INFO, f"{threads} of {cores} threads for {what}: {why}")
    torch.set_num_threads(threads)
