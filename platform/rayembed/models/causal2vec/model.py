"""Causal2Vec: a causal LLM whose input contains Contextual tokens, which an encoder computes from
the whole text (arXiv 2507.23386).

B texts, T tokens of the LLM, n Contextual tokens, k the encoder's width, d the LLM's, D 2·d.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rayembed.models.attention.packed import Packed, packed_states, token_states
from rayembed.models.causal2vec.config import Causal2VecConfig, Representation
from rayembed.models.causal2vec.contextual_tokens import ContextualTokens
from rayembed.models.causal2vec.tokens import Causal2VecTokenizer
from rayembed.models.contract import EmbedOutput, Tokens
from rayembed.models.loading.backbones import first_position
from rayembed.models.passes.passes import passes
from rayembed.models.pooling import eos, masked_mean
from rayembed.models.transformer_model import TransformerModel


class Causal2Vec(TransformerModel):
    """An LLM, a bidirectional encoder and the layers between them; the code of neither transformer
    is patched.

    Parameters are `backbone.…` and `encoder.…` as transformers names them, and `contextual.…`.
    """

    config: Causal2VecConfig
    tokenizer: Causal2VecTokenizer
    takes_packed = True

    def __init__(
        self,
        config: Causal2VecConfig,
        backbone: Any,
        encoder: Any | None,
        contextual: ContextualTokens,
        tokenizer: Causal2VecTokenizer,
    ) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.encoder = encoder
        self.contextual = contextual
        self.tokenizer = tokenizer
        self.dimensions = (_width(config, backbone, encoder),)
        self._first_position = 0 if encoder is None else first_position(encoder)

    @property
    def parts(self) -> dict[str, Any]:
        """The LLM and, if the model has one, the encoder, by setting name."""
        encoder = {} if self.encoder is None else {"encoder": self.encoder}
        return {"backbone": self.backbone} | encoder

    @property
    def part_tokenizers(self) -> dict[str, Any]:
        """Tokenizers of the LLM and of the encoder, if the model has an encoder."""
        encoder = self.tokenizer.encoder
        return super().part_tokenizers | (
            {} if encoder is None else {"encoder": encoder.pretrained}
        )

    @property
    def head(self) -> ContextualTokens:
        """Layers between encoder and LLM."""
        return self.contextual

    def forward(self, batch: dict[str, Tensor], context: Tensor | None = None) -> EmbedOutput:
        """Embed a micro-batch to unit vectors (B, D); each part's input may be packed or padded,
        and `context` must be None.

        `encoder_output` in the batch, where it is there, stands for the encoder's pass.
        """
        read = self._read_by_encoder(batch)
        embeddings = self.backbone.get_input_embeddings()(batch["input_ids"])
        tokens = None
        if read is not None and self.config.contextual_tokens:
            tokens = self.contextual.projector(read)
            embeddings = _placed(embeddings, tokens.to(embeddings.dtype), batch)
        packed = Packed.of(batch)
        if packed is not None:
            positions = batch["position_ids"]
            states = packed_states(self.backbone, packed, positions, inputs_embeds=embeddings)
            last = eos(states, packed, batch["contextual_mask"])
        else:
            mask = batch["attention_mask"]
            # Positions count the text's own tokens, whatever padding stands before them.
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
            states = self.backbone(
                inputs_embeds=embeddings, attention_mask=mask, position_ids=positions
            ).last_hidden_state
            places = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
            last = states[torch.arange(states.shape[0], device=states.device), places].float()

        def contextual() -> Tensor:
            return masked_mean(states, batch["contextual_mask"], packed)

        return EmbedOutput(self._represent(last, contextual, read, tokens))

    def known_ahead(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Precompute the indices of the Contextual tokens; see `EmbeddingModel`."""
        return {"contextual_places": batch["contextual_mask"].flatten().nonzero().squeeze(1)}

    def _read_by_encoder(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Read each text with the encoder, to vectors (B, n, k) float32; None if the model has no
        encoder.
        """
        if self.config.encoder is None or self.encoder is None:
            return None
        if "encoder_output" in batch:
            return batch["encoder_output"]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.config.encoder.frozen):
            states, layout = token_states(self.encoder, batch, self._first_position, "encoder_")
        read: Tensor = self.contextual.reader(states, layout)
        return read

    def _represent(
        self,
        last: Tensor,
        contextual: Callable[[], Tensor],
        read: Tensor | None,
        tokens: Tensor | None,
    ) -> Tensor:
        """Combine the LLM's states and the encoder's vectors into unit vectors (B, D) float32, as
        the setting `representation` says.

        Args:
            last: (B, d) float32 states of EOS.
            contextual: gives the (B, d) float32 mean of the Contextual tokens' states.
        """
        match self.config.representation:
            case "eos":
                vector = last
            case "concat":
                vector = torch.cat([contextual(), last], dim=-1)
            case "average":
                vector = (contextual() + last) / 2
            case "concat_encoder":
                assert tokens is not None
                vector = torch.cat([tokens.float().mean(dim=1), last], dim=-1)
            case "separate":
                assert read is not None
                parts = (functional.normalize(part, dim=-1) for part in (read.mean(dim=1), last))
                vector = torch.cat(list(parts), dim=-1)
        return functional.normalize(vector, dim=-1)

    def first_pass(self, tokens: Sequence[Tokens], tokens_per_batch: int) -> Sequence[Tokens]:
        """Run the encoder on all texts, and add its output to each text's tokens as
        `encoder_output` (n, k) float32.
        """
        if self.encoder is None or not tokens:
            return tokens
        outputs: list[np.ndarray] = [np.empty(0)] * len(tokens)
        lengths = [len(one["encoder_ids"]) for one in tokens]
        ways = self.tokenizer.collate_for_encoder, self.tokenizer.pack_for_encoder

        def read(batch: dict[str, Tensor]) -> Tensor:
            found = self._read_by_encoder(batch)
            assert found is not None
            return found

        for chosen, made in passes(self, tokens, lengths, tokens_per_batch, read, collate=ways):
            for place, output in zip(chosen, made.numpy(), strict=True):
                outputs[place] = output
        return [
            {**one, "encoder_output": output} for one, output in zip(tokens, outputs, strict=True)
        ]


def _placed(embeddings: Tensor, tokens: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Insert the Contextual tokens (B, n, d) at their positions in the input vectors (…, d)."""
    places = batch.get("contextual_places")
    if places is None:
        return embeddings.masked_scatter(batch["contextual_mask"].unsqueeze(-1), tokens)
    # The host would wait for its device in the backward pass of a scatter by a mask.
    flat = embeddings.flatten(0, -2).index_copy(0, places, tokens.flatten(0, 1))
    return flat.view_as(embeddings)


def _width(config: Causal2VecConfig, backbone: Any, encoder: Any | None) -> int:
    """Return the embedding width D that results from the `representation` setting."""
    width = int(backbone.config.hidden_size)
    kind: Representation = config.representation
    if kind in ("concat", "concat_encoder"):
        return 2 * width
    if kind == "separate" and encoder is not None:
        return width + int(encoder.config.hidden_size)
    return width
