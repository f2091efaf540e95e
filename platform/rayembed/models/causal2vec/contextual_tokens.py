"""Compute Contextual tokens from an encoder's hidden states (arXiv 2507.23386, section
3.2).

B texts, S tokens of the encoder and k its width, n Contextual tokens, d the LLM's width.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from rayembed.models.attention.packed import Packed
from rayembed.models.attention.varlen import varlen_attention
from rayembed.models.causal2vec.config import Causal2VecConfig
from rayembed.models.pooling import Layout, States, every_token, masked_mean

_TEXTS_TO_MEASURE = (16, 32)
"""Shape of the random batch for measuring: texts and tokens of each."""

_WORDS_AT_ONCE = 4096


class MeanReader(nn.Module):
    """Reads a text as one vector: the mean of the encoder's last states, special tokens
    included.
    """

    def forward(self, states: States, layout: Layout) -> Float[Tensor, "batch 1 hidden"]:
        """Return the mean over each text's tokens, float32."""
        seen = every_token(states, layout)
        return masked_mean(states, seen, layout).unsqueeze(1)


class QueryReader(nn.Module):
    """Reads a text as n vectors: cross-attention of n learnt queries to the encoder's last
    states.

    "Following Carion et al.; Li et al." is all that the paper tells (section 4.4, Table 5). Here it
    is one layer with as many heads as those of the encoder.
    """

    def __init__(self, width: int, *, num_tokens: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries = nn.Parameter(torch.randn(num_tokens, width))
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_kv = nn.Linear(width, 2 * width, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)

    def forward(self, states: States, layout: Layout) -> Float[Tensor, "batch n hidden"]:
        """Return the attention output of each query, float32."""
        if isinstance(layout, Packed):
            attended = self._within_texts(states, layout)
        else:
            attended = self._attended(states, layout)
        read: Tensor = self.to_out(attended)
        return read.float()

    def _attended(self, states: Tensor, mask: Tensor) -> Tensor:
        """Attend from the queries to padded texts; returns (B, n, k)."""
        batch, width = states.shape[0], states.shape[-1]
        queries = self.to_q(self.queries).expand(batch, -1, -1)
        keys, values = self.to_kv(states).chunk(2, dim=-1)
        queries, keys, values = (
            x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (queries, keys, values)
        )
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask.bool()[:, None, None, :]
        )
        return attended.transpose(1, 2).reshape(batch, -1, width)

    def _within_texts(self, states: Tensor, packed: Packed) -> Tensor:
        """Attend from the queries to packed texts; returns (B, n, k)."""
        batch, num_queries = len(packed.cu_seqlens) - 1, len(self.queries)
        queries = self.to_q(self.queries).expand(batch, -1, -1).flatten(0, 1)
        queries, keys, values = (
            x.unflatten(-1, (self.num_heads, -1))
            for x in (queries, *self.to_kv(states).chunk(2, dim=-1))
        )
        ends = packed.cu_seqlens
        cu_queries = num_queries * torch.arange(batch + 1, device=ends.device, dtype=ends.dtype)
        longest = (num_queries, packed.longest)
        attended = varlen_attention(queries, keys, values, cu_queries, ends, longest)
        return attended.flatten(1).view(batch, num_queries, -1)


class Projector(nn.Module):
    """MLP that maps the reader's vectors to the LLM's width: C = GELU(h W1ᵀ) W2ᵀ (equation 1)."""

    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, out_width, bias=False)
        self.second = nn.Linear(out_width, out_width, bias=False)

    def forward(self, read: Float[Tensor, "batch n width"]) -> Float[Tensor, "batch n out"]:
        """Return the Contextual tokens in the layers' dtype."""
        inner = functional.gelu(self.first(read.to(self.first.weight.dtype)))
        tokens: Tensor = self.second(inner)
        return tokens


class ContextualTokens(nn.Module):
    """Layers between encoder and LLM: reader and projector, which the model calls one after the
    other.
    """

    def __init__(self, reader: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.reader = reader
        self.projector = projector


@torch.no_grad()
def scale_to_words(head: ContextualTokens, encoder: Any, words: nn.Module) -> None:
    """Scale the MLP's last layer in place so that Contextual tokens have the same norm as word
    vectors.

    Measured by the root mean square over texts of random tokens; the same for any random state.

    Args:
        words: the LLM's embedding of ids; some (Gemma's) scale what they look up.
    """
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(int(encoder.config.vocab_size), _TEXTS_TO_MEASURE, generator=drawn)
    mask = torch.ones_like(ids)
    states = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    projector = head.projector
    assert isinstance(projector, Projector)
    tokens = projector(head.reader(states, mask))
    projector.second.weight.mul_(_rms_of_words(words) / _rms([tokens]))


def _rms_of_words(words: Any) -> float:
    """Compute the root mean square of all word vectors of the vocabulary, in chunks."""
    ids = torch.arange(int(words.num_embeddings), device=words.weight.device)
    return _rms(words(piece) for piece in torch.split(ids, _WORDS_AT_ONCE))


def _rms(pieces: Iterable[Tensor]) -> float:
    squares, count = 0.0, 0
    for piece in pieces:
        squares += float(torch.linalg.vector_norm(piece, dtype=torch.float32)) ** 2
        count += piece.numel()
    return math.sqrt(squares / count)


def build_contextual_tokens(
    config: Causal2VecConfig, hidden_size: int, encoder_settings: object | None
) -> ContextualTokens:
    """Build reader and projector from the settings; the projector has no weights if no Contextual
    tokens are used.

    Args:
        hidden_size: d.
        encoder_settings: the encoder's transformers configuration; None: there is no encoder.
    """
    width = int(getattr(encoder_settings, "hidden_size", 0))
    reader: nn.Module = MeanReader()
    if config.num_contextual_tokens > 1:
        num_heads = int(getattr(encoder_settings, "num_attention_heads", 1))
        num_tokens = config.num_contextual_tokens
        reader = QueryReader(width, num_tokens=num_tokens, num_heads=num_heads)
    projector = Projector(width, hidden_size) if config.contextual_tokens else nn.Identity()
    return ContextualTokens(reader, projector)
