"""What the trainer, the evaluator and the registry know of a model, and nothing else.

Shapes: B texts of a micro-batch, D embedding width, S summable statistics, C context vectors.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

Role = Literal["query", "document"]

Tokens = Mapping[str, np.ndarray]
"""One tokenised text: arrays such as `input_ids` (T,) int32 and `pool_mask` (T,) bool.
`input_ids` is always there; its length is what the text costs."""


class Tokenizer(Protocol):
    """Makes tokens of texts. Picklable and free of torch modules: it runs in data workers."""

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
        """One padded micro-batch: tensors of B rows, `attention_mask` (B, longest) among them."""
        ...


class PromptTokenizer(Tokenizer, Protocol):
    """A tokenizer that puts a literal head before a text: a prefix, an instruction, a prompt."""

    pretrained: Any
    """The tokenizer of transformers."""
    max_lengths: dict[Role, int]
    """Tokens of a text of each role, all told."""

    def head(self, instruction: str, role: Role) -> str:
        """The literal text before a text of this role with this instruction."""
        ...

    def with_heads(
        self, texts: Sequence[str], heads: Sequence[str], role: Role, *, allow_empty: bool = False
    ) -> list[Tokens]:
        """Tokens of each text with its head before it; raises as a call does."""
        ...

    def room(self, role: Role) -> int:
        """Tokens that head and text of this role may have together."""
        ...

    def num_head_tokens(self, head: str) -> int:
        """Tokens that a head takes of the room, at most."""
        ...


@runtime_checkable
class TrainingTokenizer(Tokenizer, Protocol):
    """A tokenizer that gives other tokens in training than where the model is used."""

    def in_training(self) -> Tokenizer:
        """The one for training; this one is left as it is."""
        ...


@runtime_checkable
class InContextTokenizer(Tokenizer, Protocol):
    """A tokenizer whose queries may have examples of their task before them in training."""

    @property
    def max_examples(self) -> int:
        """Of one query; 0: none."""
        ...

    def instruct(self, instruction: str, examples: Sequence[tuple[str, str]]) -> str:
        """The instruction with as many of the pairs (query, positive) before it as may stand."""
        ...


class EmbedOutput(NamedTuple):
    """What a forward pass gives for one micro-batch; a tuple, in which engines find the tensors."""

    embeddings: Tensor
    """(B, D) float32, of unit length."""
    statistics: Tensor | None = None
    """(S,) float32 sums over the micro-batch (router loads of a mixture of experts), which add up
    over micro-batches and workers to what `auxiliary_loss` takes. None: the model has none. A
    text counts as often as the micro-batch's `occurrences` (B,) says; without it, once."""


class TrainableModel(nn.Module):
    """What an engine trains: a module that tells its parameters apart and keeps its buffers."""

    def backbone_parameter(self, name: str) -> bool:
        """Whether the named parameter belongs to the pretrained backbone (or its adapters)."""
        raise TypeError(f"{type(self).__name__} does not tell its parameters apart")

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations layer by layer in the backward pass from now on."""
        raise TypeError(f"{type(self).__name__} cannot recompute its activations")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply a cast or a move to all tensors but never lower the precision of buffers.

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
    """Base of the architectures: a module whose forward pass embeds tokens.

    Sub-classes set `tokenizer` and `dimensions` and implement `forward`, `save` and what of the
    optional parts (context, auxiliary loss) their architecture has.
    """

    tokenizer: Tokenizer
    dimensions: tuple[int, ...]
    """Widths at which the embedding may be cut, the full one first."""

    def forward(self, batch: dict[str, Tensor], context: Tensor | None = None) -> EmbedOutput:
        """Embeddings of one collated micro-batch; `context` only where `uses_context`."""
        raise TypeError(f"{type(self).__name__} does not embed")

    uses_context: bool = False
    """Whether `forward` needs the vectors that `embed_context` makes of the batch's documents."""
    max_context: int | None = None
    """Context documents that `forward` takes at most, so many a trainer draws; None: any number."""
    added_tokens: int = 0
    """Positions that `forward` adds to each text, which cost what tokens cost."""
    default_instructions: Mapping[Role, str] = MappingProxyType({})
    """Of texts of a role for which nobody names an instruction: what a run told of all its data."""

    def instruction_of(self, role: Role, given: str | None) -> str:
        """The instruction of texts of this role; the model's own where none is given.

        Args:
            given: "": none at all.
        """
        return self.default_instructions.get(role, "") if given is None else given

    def embed_context(self, batch: dict[str, Tensor]) -> Tensor:
        """(B, C) context vectors of one collated micro-batch of documents."""
        raise TypeError(f"{type(self).__name__} takes no context")

    def first_pass(self, tokens: Sequence[Tokens], tokens_per_batch: int) -> Sequence[Tokens]:
        """The tokens after a first part of the model has read them, in micro-batches of its own.

        For inference: each part of the model then works on texts that were sorted by their length
        for it. `forward` gives the same for these tokens. Here they come back as they are.

        Args:
            tokens_per_batch: padded tokens of a micro-batch.
        """
        return tokens

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        """Scalar that is added to the loss, of the statistics summed over the global batch."""
        raise TypeError(f"{type(self).__name__} has no auxiliary loss")

    def statistics_metrics(self, statistics: Tensor) -> dict[str, float]:
        """What a log says of a step's statistics, which are those of the global batch."""
        return {}

    def save(self, folder: Path, *, instructions: Mapping[str, str] | None = None) -> None:
        """Write safetensors + JSON from which `load_model` and sentence-transformers build it.

        Args:
            instructions: task definitions by name, kept as prompts for sentence-transformers.
        """
        raise TypeError(f"{type(self).__name__} cannot be saved")


def cost(tokens: Tokens) -> int:
    """Length of a tokenised text, by which texts are sorted and micro-batches are cut."""
    return len(tokens["input_ids"])


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The micro-batch on the device, copied without waiting where memory is pinned."""
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def settings_of(value: Any) -> dict[str, Any]:
    """Plain values of a settings object, for the JSON beside saved weights."""
    dumped: dict[str, Any] = value.model_dump(mode="json")
    return dumped
