"""Encoder of Nomic Embed v2: BERT with rotary positions, in which some MLPs are mixtures of
experts.

Post-norm: x = norm1(attention(x) + x), then x = norm2(mlp(x) + x). Modules have the names of the
published weights. B texts, T tokens, H hidden size, L MoE layers, E experts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rayembed.models.attention.packed import Packed
from rayembed.models.attention.short_texts import attention
from rayembed.models.experts import MoeMlp
from rayembed.models.loading.files import write_json
from rayembed.models.nomic_moe.shape import EncoderShape, published_settings
from rayembed.models.pooling import Layout


class Statistics(NamedTuple):
    """Router statistics for the balance loss, summed over tokens; batches can be added."""

    load: Tensor
    """(L, E) tokens routed to each expert."""
    probability: Tensor
    """(L, E) summed router probabilities."""
    entropy: Tensor
    """(L,) summed router entropies in nats."""
    tokens: Tensor
    """Scalar number of tokens."""

    def packed(self) -> Tensor:
        """Concatenate all statistics to one vector of L·(2·E + 1) + 1 numbers."""
        parts = (self.load, self.probability, self.entropy, self.tokens)
        return torch.cat([part.flatten() for part in parts])

    @classmethod
    def of(cls, packed: Tensor, num_layers: int, num_experts: int) -> "Statistics":
        """Split a `packed` vector into the statistics."""
        size = num_layers * num_experts
        load, probability, entropy, tokens = torch.split(packed, [size, size, num_layers, 1])
        shape = (num_layers, num_experts)
        return cls(load.view(shape), probability.view(shape), entropy, tokens.squeeze(0))


class EncoderOutput(NamedTuple):
    """Output of the encoder for a micro-batch."""

    last_hidden_state: Tensor
    """Hidden states (B, T, H)."""
    statistics: Tensor | None
    """Packed `Statistics`; None if all MLPs are dense."""


class EncoderTokens(NamedTuple):
    """Tokens among the B·T positions that the experts process, with their weights in the
    statistics.
    """

    places: Tensor | None
    """(N,) indices among all positions; None for all."""
    occurrences: Tensor
    """(N,) float32 weight of each token in the statistics."""


class Embeddings(nn.Module):
    """Input vectors: word embeddings plus the first token-type embedding, which all tokens
    share.
    """

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.token_type_embeddings = nn.Embedding(shape.type_vocab_size, shape.hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the input vectors (B, T, H) of the tokens."""
        types = self.token_type_embeddings(torch.zeros_like(input_ids))
        embedded: Tensor = self.word_embeddings(input_ids) + types
        return embedded


class Attention(nn.Module):
    """Multi-head attention over all tokens with rotary positions."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.Wqkv = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.out_proj = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, x: Tensor, layout: Layout, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return the attention output (B, T, H); for packed texts B is 1.

        Args:
            layout: (B, 1, 1, T) bool, false at padding; or where packed texts stand.
        """
        batch, tokens, _ = x.shape
        qkv = self.Wqkv(x).view(batch, tokens, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query, key = _rotate(query, rotation), _rotate(key, rotation)
        mask, ends = (None, layout.for_attention()) if isinstance(layout, Packed) else (layout, {})
        attended, _ = attention(self, query, key, value, mask, is_causal=False, **ends)
        projected: Tensor = self.out_proj(attended.reshape(batch, tokens, -1))
        return projected


class DenseMlp(nn.Module):
    """Two linear layers with GELU between."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.hidden_size, shape.inner_size)
        self.fc2 = nn.Linear(shape.inner_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output, (B, T, H)."""
        made: Tensor = self.fc2(functional.gelu(self.fc1(x)))
        return made


class Layer(nn.Module):
    """Transformer layer: attention, then a dense or mixture-of-experts MLP, each followed by a
    residual sum and a norm.
    """

    gradient_checkpointing = False
    """Whether it is recomputed in the backward pass, while in training."""

    def __init__(self, shape: EncoderShape, *, moe: bool) -> None:
        super().__init__()
        self.attn = Attention(shape)
        self.norm1 = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)
        self.norm2 = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)
        self.mlp: DenseMlp | MoeMlp = DenseMlp(shape)
        if moe:
            self.mlp = MoeMlp(
                shape.hidden_size,
                shape.inner_size,
                shape.num_experts,
                shape.top_k,
                hidden_bias=shape.expert_hidden_bias,
            )

    def forward(
        self, x: Tensor, layout: Layout, rotation: tuple[Tensor, Tensor], tokens: EncoderTokens
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """Return hidden states (B, T, H); for a mixture of experts also the router's load,
        probability and entropy.
        """
        x = self.norm1(self.attn(x, layout, rotation) + x)
        if isinstance(self.mlp, DenseMlp):
            return self.norm2(self.mlp(x) + x), None
        flat = x.flatten(0, 1)
        if tokens.places is None:
            routed = self.mlp(flat, tokens.occurrences)
            made = routed.output
        else:
            routed = self.mlp(flat[tokens.places], tokens.occurrences)
            # Padding, which nothing reads, goes past the experts.
            made = torch.zeros_like(flat).index_copy(0, tokens.places, routed.output)
        return self.norm2(made.view_as(x) + x), (routed.load, routed.probability, routed.entropy)


class EncoderLayers(nn.Module):
    """List of layers, a module of its own only because published weight names contain it."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(shape, moe=shape.is_moe(layer)) for layer in range(shape.num_layers)
        )


class NomicEncoder(nn.Module):
    """The whole encoder; its weights are uninitialised until they are loaded."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.config = shape
        self.embeddings = Embeddings(shape)
        self.emb_ln = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)
        self.encoder = EncoderLayers(shape)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        counted: Tensor | None = None,
        occurrences: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> EncoderOutput:
        """Return hidden states and router statistics of a padded micro-batch.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), zero at padding, which no token attends to.
            counted: (B, T), zero at places that experts and statistics leave out; None: at
                padding.
            occurrences: (B,) how often each text counts in the statistics; None: once.
            seen: (N,) int64 indices of the places that are not left out, for which the host would
                wait for its device.
        """
        mask = attention_mask.bool()
        tokens = EncoderTokens(None, mask.new_empty(0))
        if self.config.moe_layers:
            if seen is None:
                kept = mask if counted is None else counted
                seen = kept.flatten().nonzero().squeeze(1)
            tokens = _tokens(seen, mask.shape[1], occurrences)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self._output(input_ids, mask[:, None, None, :], positions, tokens)

    def forward_packed(
        self,
        input_ids: Tensor,
        packed: Packed,
        positions: Tensor,
        occurrences: Tensor | None = None,
    ) -> EncoderOutput:
        """Return hidden states (T, H) and router statistics of packed texts.

        Args:
            input_ids: (T,).
            positions: (T,) place of each token in its text.
            occurrences: as in `forward`.
        """
        if occurrences is None:
            counts = torch.ones(len(input_ids), device=input_ids.device)
        else:
            counts = packed.of_tokens(occurrences.float(), len(input_ids))
        ids = input_ids.unsqueeze(0)
        output = self._output(ids, packed, positions, EncoderTokens(None, counts))
        return output._replace(last_hidden_state=output.last_hidden_state.squeeze(0))

    def _output(
        self, input_ids: Tensor, layout: Layout, positions: Tensor, tokens: EncoderTokens
    ) -> EncoderOutput:
        rotation = _rotation(positions, self.config)
        x = self.emb_ln(self.embeddings(input_ids))
        found = []
        for layer in self.encoder.layers:
            arguments = (x, layout, rotation, tokens)
            if layer.gradient_checkpointing and self.training:
                x, routed = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                x, routed = layer(*arguments)
            if routed is not None:
                found.append(routed)
        if not found:
            return EncoderOutput(x, None)
        load, probability, entropy = (torch.stack(parts) for parts in zip(*found, strict=True))
        counted_tokens = tokens.occurrences.sum()
        return EncoderOutput(x, Statistics(load, probability, entropy, counted_tokens).packed())

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the word embeddings; transformers' models have a method of this name too."""
        return self.embeddings.word_embeddings

    def save_pretrained(self, folder: str, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write config.json and model.safetensors in the published layout.

        Args:
            folder: created if missing.
            state_dict: weights to write instead of the encoder's own.
        """
        import safetensors.torch

        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        write_json(place / "config.json", published_settings(self.config))
        weights = self.state_dict() if state_dict is None else state_dict
        safetensors.torch.save_file(
            {name: value.contiguous() for name, value in weights.items()},
            place / "model.safetensors",
            metadata={"format": "pt"},
        )


def _tokens(places: Tensor, longest: int, occurrences: Tensor | None) -> EncoderTokens:
    if occurrences is None:
        return EncoderTokens(places, torch.ones_like(places, dtype=torch.float32))
    return EncoderTokens(places, occurrences.float()[places // longest])


def _rotation(positions: Tensor, shape: EncoderShape) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine of the rotary angles at positions (T,), each (T, head width),
    float32.
    """
    width = shape.hidden_size // shape.num_heads
    steps = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angles = torch.outer(positions.float(), shape.rotary_base**-steps).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary position embeddings to queries or keys (B, heads, T, width), pairing the first
    half of the width with the second.
    """
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cosine + turned * sine).to(x.dtype)
