"""NomicBert encoder with BERT's masked-word prediction head, whose output weights are the word
vectors.

B sequences, T tokens, N masked tokens of a micro-batch, H hidden size, V words.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rayembed.models.contract import TrainableModel
from rayembed.models.layers import compile_layers
from rayembed.models.nomic_moe.encoder import NomicEncoder
from rayembed.models.nomic_moe.shape import EncoderShape
from rayembed.models.tokens import padded


class Predictions(NamedTuple):
    """Predictions for the masked tokens; a tuple, so that training engines can find the tensors in
    it.
    """

    losses: Tensor
    """(N,) float32 negative log-likelihood of the correct word."""
    correct: Tensor
    """(N,) bool: the correct word has the highest probability."""


class MaskedLanguageHead(nn.Module):
    """BERT's prediction head: linear layer, GELU, norm and a bias for each word; its outputs are
    multiplied by the word vectors.

    The same in BERT, RoBERTa and XLM-R.
    """

    def __init__(self, shape: EncoderShape, num_words: int) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.layer_norm = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(num_words))

    def forward(self, states: Tensor) -> Tensor:
        """Transform hidden states (N, H) for the product with the word vectors."""
        made: Tensor = self.layer_norm(functional.gelu(self.dense(states)))
        return made


class MaskedLanguageModel(TrainableModel):
    """An encoder and its prediction head, tied to the encoder's word vectors.

    Rows that fill the vocabulary up to a round number stand for no word and are never predicted.
    """

    def __init__(self, encoder: NomicEncoder, head: MaskedLanguageHead) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, batch: Mapping[str, Tensor]) -> Predictions:
        """Predict the masked tokens of a micro-batch from `collate_masked`."""
        hidden = self.encoder(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        states = self.head(hidden.flatten(0, 1)[batch["places"]])
        words = self.encoder.embeddings.word_embeddings.weight[: len(self.head.bias)]
        # In float32: a sum over 250,000 words.
        logits = functional.linear(states, words, self.head.bias).float()
        losses = functional.cross_entropy(logits, batch["words"], reduction="none")
        return Predictions(losses, logits.detach().argmax(dim=1) == batch["words"])

    def backbone_parameter(self, name: str) -> bool:
        """Whether the named parameter belongs to the encoder, not to the head."""
        return name.startswith("encoder.")

    @property
    def trained_parts(self) -> list[Any]:
        """Return the only pretrained part, the encoder."""
        return [self.encoder]

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile the encoder's layers for all later passes, as `layers.compile_layers` does."""
        compile_layers([self.encoder], backend)


def collate_masked(
    input_ids: Sequence[np.ndarray],
    places: Sequence[np.ndarray],
    words: Sequence[np.ndarray],
    pad_id: int,
) -> dict[str, Tensor]:
    """Collate one micro-batch, padded on the right.

    `input_ids` and `attention_mask` (B, T) int64; of the masked tokens, sequence after sequence,
    `places` (N,) among all B·T and `words` (N,), which stood there, both int64.

    Args:
        input_ids: of each sequence, masked.
        places: of each sequence, within it.
        words: as `places`.
    """
    ids, mask = padded(input_ids, pad_id)
    longest = ids.shape[1]
    flat = [row * longest + inside.astype(np.int64) for row, inside in enumerate(places)]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "places": torch.from_numpy(np.concatenate(flat)),
        "words": torch.from_numpy(np.concatenate(words).astype(np.int64)),
    }
