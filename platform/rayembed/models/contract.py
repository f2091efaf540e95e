"""Interfaces of models and tokenizers, through which the rest of the code uses them.

Shapes: B texts of a micro-batch, D embedding width, S summable statistics, C context vectors.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from rayembed.config.types import Role, Unpadded
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.layers import recomputable_layers, recompute_layers

Tokens = Mapping[str, np.ndarray]
"""One tokenised text: arrays such as `input_ids` (T,) int32 and `pool_mask` (T,) bool. `input_ids`
is required; its length is the text's cost."""


class Tokenizer(Protocol):
    """Protocol of tokenizers: turn texts into tokens, and tokens into micro-batches. Picklable and
    free of torch modules: it runs in data workers.
    """

    def __call__(
        self,
        texts: Sequence[str],
        role: Role,
        instructions: Sequence[str] | None = None,
        *,
        allow_empty: bool = False,
    ) -> list[Tokens]:
        """Tokenise texts in their role.

        Args:
            instructions: the task definition of each text, `""` for none; None: none at all.
            allow_empty: give a text without tokens of its own its special tokens alone, since a
                benchmark's corpus may hold empty documents.

        Raises:
            DataError: a text tokenises to nothing but special tokens; the message shows it.
        """
        ...

    def collate(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        """Collate a padded micro-batch: tensors of B rows, with `attention_mask` (B, longest)."""
        ...


@runtime_checkable
class PackingTokenizer(Tokenizer, Protocol):
    """Protocol of tokenizers that can also collate micro-batches without padding."""

    def pack(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        """Collate a packed micro-batch: the tokens of all texts in one sequence, see `packed`."""
        ...


class PromptTokenizer(Tokenizer, Protocol):
    """Protocol of tokenizers that put a literal prompt before a text: a prefix, an instruction, or
    both.
    """

    pretrained: Any
    """Underlying tokenizer of transformers."""
    max_lengths: dict[Role, int]
    """Maximum total tokens of a text, by role."""

    def prompt(self, instruction: str, role: Role) -> str:
        """Return the literal prompt that this instruction puts before texts of this role."""
        ...

    def with_prompts(
        self, texts: Sequence[str], prompts: Sequence[str], role: Role, *, allow_empty: bool = False
    ) -> list[Tokens]:
        """Tokenise each text after its literal prompt; raises the same errors as `__call__`."""
        ...

    def budget(self, role: Role) -> int:
        """Number of tokens that prompt and text may have together in this role."""
        ...

    def num_prompt_tokens(self, prompt: str) -> int:
        """Largest number of tokens that a prompt may take of the `budget`."""
        ...


@runtime_checkable
class TrainingTokenizer(Tokenizer, Protocol):
    """Protocol of tokenizers that produce different tokens in training than in inference."""

    def in_training(self) -> Tokenizer:
        """Return a copy of the tokenizer for training."""
        ...


@runtime_checkable
class InContextTokenizer(Tokenizer, Protocol):
    """Protocol of tokenizers that can put in-context examples before queries in training."""

    @property
    def max_examples(self) -> int:
        """Maximum number of in-context examples before a query; 0 if examples are off."""
        ...

    def instruct(self, instruction: str, examples: Sequence[tuple[str, str]]) -> str:
        """Prepend example pairs (query, positive) to the instruction, as many as are allowed."""
        ...


class EmbedOutput(NamedTuple):
    """Output of the forward pass of one micro-batch; a tuple, so that engines such as DeepSpeed see
    its tensors.
    """

    embeddings: Tensor
    """(B, D) float32 unit vectors."""
    statistics: Tensor | None = None
    """(S,) float32 statistics of the micro-batch (router loads of a mixture of experts), summed
    over micro-batches and workers for `auxiliary_loss`; None for models without any. A text counts
    `occurrences` (B,) times if the micro-batch has it, else once."""


class TrainableModel(nn.Module):
    """Base class of trainable models: says which parameters are the backbone's, and keeps buffers
    in float32 when the model is cast.
    """

    kept_zeros: Mapping[str, Tensor] = MappingProxyType({})
    """Masks of weights that stay zero, by parameter name after adapters are merged: bool, in the
    parameter's shape."""

    def backbone_parameter(self, name: str) -> bool:
        """Whether the named parameter belongs to the pretrained backbone (or its adapters)."""
        raise TypeError(
            f"{type(self).__name__} must define the method backbone_parameter, which says whether "
            "a parameter belongs to the backbone"
        )

    @property
    def trained_parts(self) -> list[Any]:
        """Transformers of the model that are trained or have trained adapters."""
        return []

    def recompute_layers(self, number: int | None = None, between_products: int = 0) -> None:
        """Recompute the activations of the first `number` layers in the backward pass; of the next
        `between_products` layers, all but matrix products.

        Raises:
            ConfigError: there are none.
        """
        if not recomputable_layers(self.trained_parts):
            raise ConfigError(
                f"{type(self).__name__} cannot recompute its activations; set "
                "placement.gradient_checkpointing=false"
            )
        recompute_layers(self.trained_parts, number, between_products)

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile the layers in place, see `layers.compile_layers`."""
        raise TypeError(f"{type(self).__name__} does not support compiling its layers")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Cast or move all tensors, but keep float32 buffers in float32.

        Rotary frequencies live in buffers. DeepSpeed casts a whole model by `bfloat16()`; rounded
        to 8 bits they turn tokens by wrong angles, up to 0.7 rad at position 500.
        """
        kept = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.dtype == torch.float32
        ]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for module, name, before in kept:
            after = module._buffers[name]
            if after is not None and after.dtype in (torch.bfloat16, torch.float16):
                module._buffers[name] = before.to(after.device)
        return self


class EmbeddingModel(TrainableModel):
    """Base class of embedding models: a module whose forward pass turns tokens into
    vectors.

    Sub-classes set `tokenizer` and `dimensions` and implement `forward`, `save` and what of the
    optional parts (context, auxiliary loss) their architecture has.
    """

    tokenizer: Tokenizer
    dimensions: tuple[int, ...]
    """Widths at which the embedding may be truncated, the full one first."""

    def forward(self, batch: dict[str, Tensor], context: Tensor | None = None) -> EmbedOutput:
        """Embed one collated micro-batch; `context` is given only to models with `uses_context`."""
        raise TypeError(f"{type(self).__name__} must define the method forward")

    uses_context: bool = False
    """Whether `forward` needs the `embed_context` vectors of the batch's documents."""
    max_context: int | None = None
    """Maximum number of context documents for `forward`, which the trainer samples; None for any
    number."""
    added_tokens: int = 0
    """Positions that `forward` adds to each text, each as expensive as a token."""

    @property
    def device(self) -> torch.device:
        """Device on which the model computes."""
        return next(self.parameters()).device

    @property
    def number_type(self) -> str:
        """Number type in which the model computes: `float32`, `bfloat16`, or `int8` in part."""
        return str(next(self.parameters()).dtype).removeprefix("torch.")

    unpadded: Unpadded = "auto"
    """Whether micro-batches are packed instead of padded; decided by `unpadded.packs`."""
    takes_packed: bool = False
    """Whether `forward` and `embed_context` also take packed batches of a `PackingTokenizer`."""
    default_instructions: Mapping[Role, str] = MappingProxyType({})
    """Default instructions by role, for texts without one: the run's, if all its data share one."""

    def why_padded(self) -> str | None:
        """Return the reason why micro-batches must be padded on this device, in train or eval mode;
        None if they may be packed.

        Asked of models with `takes_packed` only.
        """
        return None

    def instruction_of(self, role: Role, given: str | None) -> str:
        """Return the given instruction for texts of this role, or the model's default.

        Args:
            given: "": none at all.
        """
        return self.default_instructions.get(role, "") if given is None else given

    def embed_context(self, batch: dict[str, Tensor]) -> Tensor:
        """Embed one collated micro-batch of documents to (B, C) context vectors."""
        raise TypeError(f"{type(self).__name__} does not use context documents")

    def set_corpus(self, vectors: Tensor | None) -> None:
        """Set the default context, for texts that are embedded without a context; it is saved with
        the model.

        Args:
            vectors: (n, C) of `embed_context`, n at most `max_context`; None: no corpus is known.
        """
        raise TypeError(f"{type(self).__name__} does not use context documents")

    def no_context(self) -> Tensor:
        """(0, C) tensor that stands for a context without documents."""
        raise TypeError(f"{type(self).__name__} does not use context documents")

    def known_ahead(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Precompute further entries of a collated micro-batch on the CPU, which `forward` would
        otherwise have to wait for on the GPU.
        """
        return {}

    def first_pass(self, tokens: Sequence[Tokens], tokens_per_batch: int) -> Sequence[Tokens]:
        """Run the model's first part on all texts, in micro-batches of its own, and return the
        tokens with its output.

        For inference: each part of the model then works on texts that were sorted by their length
        for it. `forward` gives the same for these tokens. Here they come back as they are.

        Args:
            tokens_per_batch: tokens of a micro-batch, padding included.
        """
        return tokens

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        """Compute a scalar that is added to the loss, from statistics summed over the
        global batch.
        """
        raise TypeError(f"{type(self).__name__} has no auxiliary loss")

    def statistics_metrics(self, statistics: Tensor) -> dict[str, float]:
        """Compute metrics for the log from the statistics of the global batch."""
        return {}

    def save(self, folder: Path, *, instructions: Mapping[str, str] | None = None) -> None:
        """Write the model as safetensors and JSON files that `load_model` and sentence-transformers
        read.

        Args:
            instructions: task definitions by name, kept as prompts for sentence-transformers.
        """
        raise TypeError(f"{type(self).__name__} does not support saving")


def cost(tokens: Tokens) -> int:
    """Number of tokens of a text, by which texts are sorted and batched."""
    return len(tokens["input_ids"])


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move the micro-batch to the device, asynchronously from pinned memory."""
    return {key: moved(value, device) for key, value in batch.items()}


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy the tensor to the device, asynchronously from pinned memory."""
    return tensor.to(device, non_blocking=True)


def pinned(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy the micro-batch to pinned memory, for asynchronous copies to a GPU."""
    return {key: value.pin_memory() for key, value in batch.items()}


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the detached trainable parameters by name; they share the model's memory."""
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def load_trainable_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy saved values into the trainable parameters, in their dtype and on their device.

    Raises:
        ArtifactError: names or shapes differ; nothing has been copied then.
    """
    own = trainable_state(model)
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unexpected:
        raise ArtifactError(
            "the saved weights belong to another model: "
            f"missing {len(missing)} {missing[:10]}, unexpected {len(unexpected)} {unexpected[:10]}"
        )
    for name, parameter in own.items():
        if parameter.shape != state[name].shape:
            raise ArtifactError(
                f"the saved weight {name!r} has the shape {tuple(state[name].shape)}, but "
                f"the model's has {tuple(parameter.shape)}"
            )
    for name, parameter in own.items():
        parameter.copy_(state[name])
