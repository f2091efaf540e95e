"""Vectors of many texts: each distinct text once, sorted by length, cut at a token budget."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rayembed.models.contract import EmbeddingModel, Role, Tokens, cost, to_device
from rayembed.models.micro_batches import cut_by_length

_TEXTS_PER_TOKENIZER_CALL = 4096
_CPU_TOKENS, _GPU_TOKENS = 2048, 16384


@torch.inference_mode()
def encode(
    model: EmbeddingModel,
    texts: Sequence[str],
    *,
    role: Role,
    instruction: str = "",
    tokens_per_batch: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    allow_empty: bool = False,
) -> np.ndarray:
    """(N, D) float32 vectors of unit length, in the order of the texts.

    Runs on the model's device, in evaluation mode; the model's mode is put back afterwards.

    Args:
        tokens_per_batch: padded tokens of a micro-batch; one longer text makes its own. None:
            16384 on a GPU, 2048 on a CPU, where 16384 outgrow the caches (in bfloat16 on two
            cores: all-MiniLM-L6-v2 147 against 128 texts a second, SmolLM2-135M 20 against 13).
        progress: called with the number of distinct texts encoded so far, and of all.
        allow_empty: embed texts without tokens of their own by their special tokens.

    Raises:
        DataError: a text without tokens of its own, unless `allow_empty`.
    """
    places: dict[str, int] = {}
    order = np.array([places.setdefault(text, len(places)) for text in texts], dtype=np.int64)
    distinct = list(places)
    vectors = np.empty((len(distinct), model.dimensions[0]), dtype=np.float32)
    tokens = _tokenize(model, distinct, role, instruction, allow_empty)
    device = next(model.parameters()).device
    budget = tokens_per_batch or (_CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS)
    was_training = model.training
    model.eval()
    try:
        done = 0
        for chosen in cut_by_length([cost(one) for one in tokens], budget):
            batch = model.tokenizer.collate([tokens[i] for i in chosen])
            embeddings = model(to_device(batch, device)).embeddings
            vectors[chosen] = embeddings.float().cpu().numpy()
            done += len(chosen)
            if progress is not None:
                progress(done, len(distinct))
    finally:
        model.train(was_training)
    return vectors[order]


def _tokenize(
    model: EmbeddingModel, texts: list[str], role: Role, instruction: str, allow_empty: bool
) -> list[Tokens]:
    tokens: list[Tokens] = []
    for start in range(0, len(texts), _TEXTS_PER_TOKENIZER_CALL):
        part = texts[start : start + _TEXTS_PER_TOKENIZER_CALL]
        instructions = [instruction] * len(part) if instruction else None
        if allow_empty:
            tokens += model.tokenizer(part, role, instructions, allow_empty=True)
        else:
            tokens += model.tokenizer(part, role, instructions)
    return tokens
