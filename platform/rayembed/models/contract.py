"""Model and tokenizer interfaces that trainer, evaluator and registry use.

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
    """Protocol of tokenizers: texts to tokens, and tokens to micro-batches. Picklable and free of
    torch modules: it runs in data workers.
    """

    def __call__(
        self,
        texts: Sequence[str],
        role: Role,
        instructions: Sequence[str] | None = None,
        *,
        allow_empty: bool = False,
    ) -> list[Tokens]:
        """Tokens of each text in its role.

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
    """Tokenizer that also collates micro-batches without padding."""

    def pack(self, tokens: Sequence[Tokens]) -> dict[str, Tensor]:
        """Collate a packed micro-batch: the texts' tokens one after the other, see `packed`."""
        ...


class PromptTokenizer(Tokenizer, Protocol):
    """Tokenizer that puts a literal prompt before a text: a prefix, an instruction, or both."""

    pretrained: Any
    """Underlying tokenizer of transformers."""
    max_lengths: dict[Role, int]
    """Maximum total tokens of a text, by role."""

    def prompt(self, instruction: str, role: Role) -> str:
        """Literal prompt before a text of this role with this instruction."""
        ...

    def with_prompts(
        self, texts: Sequence[str], prompts: Sequence[str], role: Role, *, allow_empty: bool = False
    ) -> list[Tokens]:
        """Tokens of each text after its literal prompt; raises the errors of `__call__`."""
        ...

    def budget(self, role: Role) -> int:
        """Token budget of prompt and text in this role."""
        ...

    def num_prompt_tokens(self, prompt: str) -> int:
        """Maximum tokens of a prompt within the budget."""
        ...


@runtime_checkable
class TrainingTokenizer(Tokenizer, Protocol):
    """Tokenizer that produces different tokens for training than for inference."""

    def in_training(self) -> Tokenizer:
        """Copy of the tokenizer for training."""
        ...


@runtime_checkable
class InContextTokenizer(Tokenizer, Protocol):
    """Tokenizer whose queries may be preceded by in-context examples in training."""

    @property
    def max_examples(self) -> int:
        """Maximum in-context examples of a query; 0 if none."""
        ...

    def instruct(self, instruction: str, examples: Sequence[tuple[str, str]]) -> str:
        """Prepend as many example pairs (query, positive) to the instruction as allowed."""
        ...


class EmbedOutput(NamedTuple):
    """Forward output of one micro-batch; a tuple, whose tensors engines can find."""

    embeddings: Tensor
    """(B, D) float32 unit vectors."""
    statistics: Tensor | None = None
    """(S,) float32 statistics of the micro-batch (router loads of a mixture of experts), summed
    over micro-batches and workers for `auxiliary_loss`; None for models without any. A text counts
    `occurrences` (B,) times if the micro-batch has it, else once."""


class TrainableModel(nn.Module):
    """A module that an engine trains: classifies its parameters and protects its buffers."""

    kept_zeros: Mapping[str, Tensor] = MappingProxyType({})
    """Masks of weights that stay zero, by parameter name after adapters are merged: bool, in the
    parameter's shape."""

    def backbone_parameter(self, name: str) -> bool:
        """Whether the named parameter belongs to the pretrained backbone (or its adapters)."""
        raise TypeError(
            f"{type(self).__name__} does not say which parameters belong to its backbone"
        )

    @property
    def trained_parts(self) -> list[Any]:
        """Transformers that are trained or have trained adapters."""
        return []

    def recompute_layers(self, number: int | None = None, between_products: int = 0) -> None:
        """Recompute the activations of this many layers in the backward pass, and of further layers
        all but matrix products; see `layers.recompute_layers`.

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
        raise TypeError(f"{type(self).__name__} has no layers to compile")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply a cast or move to all tensors without lowering the precision of buffers.

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
    """Base class of the architectures: a module whose forward pass embeds tokens.

    Sub-classes set `tokenizer` and `dimensions` and implement `forward`, `save` and what of the
    optional parts (context, auxiliary loss) their architecture has.
    """

    tokenizer: Tokenizer
    dimensions: tuple[int, ...]
    """Widths at which the embedding may be truncated, the full one first."""

    def forward(self, batch: dict[str, Tensor], context: Tensor | None = None) -> EmbedOutput:
        """Embed one collated micro-batch; `context` only if `uses_context`."""
        raise TypeError(f"{type(self).__name__} does not embed")

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
        """Reason why micro-batches must be padded on this device, in this mode; None if there is
        none.

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
        """(B, C) context vectors of one collated micro-batch of documents."""
        raise TypeError(f"{type(self).__name__} takes no context")

    def set_corpus(self, vectors: Tensor | None) -> None:
        """Set the default context for texts without a context of their own; it is saved with the
        model.

        Args:
            vectors: (n, C) of `embed_context`, n at most `max_context`; None: no corpus is known.
        """
        raise TypeError(f"{type(self).__name__} takes no context")

    def no_context(self) -> Tensor:
        """(0, C) context of no documents."""
        raise TypeError(f"{type(self).__name__} takes no context")

    def known_ahead(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Precompute further entries of a collated micro-batch on the CPU, so that `forward` need
        not wait for a device.
        """
        return {}

    def first_pass(self, tokens: Sequence[Tokens], tokens_per_batch: int) -> Sequence[Tokens]:
        """Run the first part of the model on its own micro-batches, and return tokens with its
        output.

        For inference: each part of the model then works on texts that were sorted by their length
        for it. `forward` gives the same for these tokens. Here they come back as they are.

        Args:
            tokens_per_batch: tokens of a micro-batch, padding included.
        """
        return tokens

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        """Scalar added to the loss, from statistics summed over the global batch."""
        raise TypeError(f"{type(self).__name__} has no auxiliary loss")

    def statistics_metrics(self, statistics: Tensor) -> dict[str, float]:
        """Log metrics from the statistics of the global batch."""
        return {}

    def save(self, folder: Path, *, instructions: Mapping[str, str] | None = None) -> None:
        """Write safetensors and JSON files that `load_model` and sentence-transformers load.

        Args:
            instructions: task definitions by name, kept as prompts for sentence-transformers.
        """
        raise TypeError(f"{type(self).__name__} cannot be saved")


def cost(tokens: Tokens) -> int:
    """Length of a tokenised text, by which texts are sorted and batched."""
    return len(tokens["input_ids"])


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move the micro-batch to the device, asynchronously from pinned memory."""
    return {key: moved(value, device) for key, value in batch.items()}


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, asynchronously from pinned memory."""
    return tensor.to(device, non_blocking=True)


def pinned(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy the micro-batch to pinned memory, for asynchronous copies to a GPU."""
    return {key: value.pin_memory() for key, value in batch.items()}


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Detached trainable parameters by name, sharing the model's memory."""
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
            "the saved weights are of another model: "
            f"missing {len(missing)} {missing[:10]}, unexpected {len(unexpected)} {unexpected[:10]}"
        )
    for name, parameter in own.items():
        if parameter.shape != state[name].shape:
            raise ArtifactError(
                f"the saved weight {name!r} has the shape {tuple(state[name].shape)}, the model's "
                f"has {tuple(parameter.shape)}"
            )
    for name, parameter in own.items():
        parameter.copy_(state[name])
