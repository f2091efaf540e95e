"""What the trainer, the evaluator and the registry know of a model, and nothing else.

Shapes: B texts of a micro-batch, D embedding width, S summable statistics, C context vectors.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

Role = Literal["query", "document"]

Tokens = Mapping[str, np.ndarray]
"""One tokenised text: arrays of one axis, such as `input_ids` (T,) int32 and `pool_mask` (T,) bool.
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
        """One padded micro-batch; every tensor is (B, longest), `attention_mask` among them."""
        ...


class EmbedOutput(NamedTuple):
    """What a forward pass gives for one micro-batch; a tuple, in which engines find the tensors."""

    embeddings: Tensor
    """(B, D) float32, of unit length."""
    statistics: Tensor | None = None
    """(S,) float32 sums over the micro-batch (router loads of a mixture of experts), which add up
    over micro-batches and workers to what `auxiliary_loss` takes. None: the model has none."""


class EmbeddingModel(nn.Module):
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

    def embed_context(self, batch: dict[str, Tensor]) -> Tensor:
        """(B, C) context vectors of one collated micro-batch of documents."""
        raise TypeError(f"{type(self).__name__} takes no context")

    def auxiliary_loss(self, statistics: Tensor) -> Tensor:
        """Scalar that is added to the loss, of the statistics summed over the global batch."""
        raise TypeError(f"{type(self).__name__} has no auxiliary loss")

    def backbone_parameter(self, name: str) -> bool:
        """Whether the named parameter belongs to the pretrained backbone (or its adapters)."""
        raise TypeError(f"{type(self).__name__} does not tell its parameters apart")

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations layer by layer in the backward pass from now on."""
        raise TypeError(f"{type(self).__name__} cannot recompute its activations")

    def save(self, folder: Path, *, instructions: Mapping[str, str] | None = None) -> None:
        """Write safetensors + JSON from which `load_model` and sentence-transformers build it.

        Args:
            instructions: task definitions by name, kept as prompts for sentence-transformers.
        """
        raise TypeError(f"{type(self).__name__} cannot be saved")

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
