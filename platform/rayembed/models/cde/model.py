"""CDE, contextual document embeddings: an encoder that reads a text after vectors of documents of
its corpus (arXiv 2410.02525).

B texts, T tokens of the longest, J context documents, S soft prompts, h the width of both the
second stage's states and the embedding.
"""

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rayembed.errors import DataError
from rayembed.models.attention.packed import Packed, packed_states, token_states
from rayembed.models.cde.config import CDEConfig
from rayembed.models.cde.layers import ContextLayers
from rayembed.models.cde.positions import SequenceLayout
from rayembed.models.contract import EmbedOutput
from rayembed.models.loading.backbones import first_position
from rayembed.models.pooling import every_token, masked_mean
from rayembed.models.tokens import PrefixTokenizer
from rayembed.models.transformer_model import TransformerModel

logger = logging.getLogger(__name__)


class CDE(TransformerModel):
    """CDE's two encoders in sequence; the code of neither is patched.

    Parameters are `backbone.…` (second stage) and `encoder.…` (first) as transformers names them,
    and `layers.…`. A corpus's context that was set is used for every text that comes without one.
    """

    config: CDEConfig
    tokenizer: PrefixTokenizer
    takes_packed = True
    corpus: Tensor | None
    """(n, h) float32 context vectors of a corpus, n at most J; None without a corpus."""

    def __init__(
        self,
        config: CDEConfig,
        backbone: Any,
        encoder: Any,
        layers: ContextLayers,
        tokenizer: PrefixTokenizer,
    ) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.encoder = encoder
        self.layers = layers
        self.tokenizer = tokenizer
        self.dimensions = (int(backbone.config.hidden_size),)
        self.uses_context = True
        self.max_context = config.num_context
        self.added_tokens = config.added_tokens
        self.register_buffer("corpus", None, persistent=False)
        self._sequence = SequenceLayout.of(config, backbone)
        self._first_position = first_position(encoder)
        self._told = False

    @property
    def parts(self) -> dict[str, Any]:
        """The second encoder (the backbone) and the first, by setting name."""
        return {"backbone": self.backbone, "encoder": self.encoder}

    @property
    def part_tokenizers(self) -> dict[str, Any]:
        """The tokenizer of both encoders, which share it."""
        return dict.fromkeys(self.parts, self.tokenizer.pretrained)

    @property
    def head(self) -> ContextLayers:
        """Layers around the two encoders."""
        return self.layers

    def embed_context(self, batch: dict[str, Tensor]) -> Tensor:
        """Embed a micro-batch of documents to (B, h) float32 context vectors, not normalised."""
        states, layout = token_states(self.encoder, batch, self._first_position)
        return self.layers.context(masked_mean(states, every_token(states, layout), layout))

    def set_corpus(self, vectors: Tensor | None) -> None:
        """Set the context vectors for all later texts; None uses the null token instead.

        Args:
            vectors: (n, h) of `embed_context`, n at most J. `no_context()`: none by choice.
                Other than for None no warning then says that a corpus is missing.

        Raises:
            DataError: another shape.
        """
        if vectors is not None:
            self._check(vectors)
            # A copy: vectors of inference mode may stand in no graph.
            vectors = vectors.detach().clone().float().to(self.layers.null.device)
        self.corpus = vectors

    def no_context(self) -> Tensor:
        """(0, h) empty context, with which the null token fills all context positions."""
        return self.layers.null.detach().new_empty(0, self.dimensions[0])

    def forward(self, batch: dict[str, Tensor], context: Tensor | None = None) -> EmbedOutput:
        """Embed a collated micro-batch to unit vectors (B, h).

        Args:
            context: (n, h) of `embed_context`, n at most J; what lacks to J is the null token.
                None: the corpus that is set.

        Raises:
            DataError: more context vectors than places, or of another width.
        """
        if context is None:
            context = self._corpus_or_none()
        self._check(context)
        packed = Packed.of(batch)
        # Not `len`, which is a fixed number in a traced graph.
        ids = batch["input_ids"]
        num_texts = ids.shape[0] if packed is None else len(packed.cu_seqlens) - 1
        prompts = self.layers.soft_prompts().expand(num_texts, -1, -1)
        before = torch.cat([self._context_tokens(context, num_texts), prompts], dim=1)
        of_states = self._mean if packed is None else partial(self._mean_of_packed, packed=packed)
        vectors = self.layers.embedding(of_states(batch, before))
        return EmbedOutput(functional.normalize(vectors, dim=-1))

    def _mean(self, batch: dict[str, Tensor], before: Tensor) -> Tensor:
        """Run padded texts and return (B, h) float32 means of their states.

        Args:
            before: (B, J + S, h) vectors that stand before each text.
        """
        mask, ids = batch["attention_mask"], batch["input_ids"]
        words = self._words(ids)
        there = mask.new_ones(before.shape[:2])
        states = self.backbone(
            inputs_embeds=torch.cat([before.to(words.dtype), words], dim=1),
            attention_mask=self._sequence.attention_mask(torch.cat([there, mask], dim=1)),
            position_ids=self._sequence.positions(ids.shape[1], ids.device),
        ).last_hidden_state
        pooled = batch["pool_mask"]
        if self.config.pool_context:
            pooled = torch.cat([there.bool(), pooled], dim=1)
        else:
            states = states[:, self.added_tokens :]
        return masked_mean(states, pooled)

    def _mean_of_packed(
        self, batch: dict[str, Tensor], before: Tensor, *, packed: Packed
    ) -> Tensor:
        """Run packed texts, each after its own context vectors, and return the means of their
        states.
        """
        ids, added = batch["input_ids"], self.added_tokens
        num_texts = len(before)
        texts = torch.arange(num_texts + 1, device=ids.device, dtype=packed.cu_seqlens.dtype)
        whole = Packed(packed.cu_seqlens + added * texts, packed.longest + added)
        words = self._words(ids)
        # Behind its text's own added vectors, and behind those of the texts before it.
        own = torch.arange(len(ids), device=ids.device)
        own = own + added * packed.of_tokens(texts[1:].long(), len(ids))
        others = whole.firsts.unsqueeze(1) + torch.arange(added, device=ids.device)
        inputs = words.new_zeros(len(ids) + num_texts * added, words.shape[1])
        inputs = inputs.index_copy(0, own, words)
        inputs = inputs.index_copy(0, others.flatten(), before.to(words.dtype).flatten(0, 1))
        places = self._sequence.positions(packed.longest, ids.device)[0]
        positions = places[whole.positions(len(inputs))]
        states = packed_states(self.backbone, whole, positions, inputs_embeds=inputs)
        if not self.config.pool_context:
            return masked_mean(states[own], batch["pool_mask"], packed)
        pooled = torch.ones(len(inputs), dtype=torch.bool, device=ids.device)
        return masked_mean(states, pooled.index_copy(0, own, batch["pool_mask"]), whole)

    def why_padded(self) -> str | None:
        """Return the reason why texts must be padded, see `TransformerModel`."""
        if self._sequence.needs_mask:
            return "context vectors are seen from beyond the backbone's attention window"
        return super().why_padded()

    def _words(self, ids: Tensor) -> Tensor:
        """Look up the (…, h) word vectors of the texts' tokens."""
        words: Tensor = self.backbone.get_input_embeddings()(ids)
        if not self.config.normalize_twice:
            return words
        normed: Tensor = self.backbone.embeddings(input_ids=ids)
        return normed

    def _context_tokens(self, context: Tensor, num_texts: int) -> Tensor:
        """(B, J, h) context vectors for each text; the null token replaces missing and dropped
        ones.
        """
        null = self.layers.null
        missing = self.config.num_context - context.shape[0]
        tokens = torch.cat([context.to(null), null.expand(missing, -1)])
        tokens = tokens.expand(num_texts, -1, -1)
        share = self.config.sequence_dropout
        if not self.training or share == 0:
            return tokens
        dropped = torch.rand(num_texts, self.config.num_context, device=null.device) < share
        return torch.where(dropped.unsqueeze(-1), null, tokens)

    def _corpus_or_none(self) -> Tensor:
        if self.corpus is not None:
            return self.corpus
        if not self._told:
            self._told = True
            logger.warning(
                "no corpus is set, so texts are embedded without context. Call set_corpus with "
                "documents of your corpus to get better vectors"
            )
        return self.no_context()

    def _check(self, context: Tensor) -> None:
        places, width = self.config.num_context, self.dimensions[0]
        if context.ndim != 2 or context.shape[1] != width or context.shape[0] > places:
            raise DataError(
                f"the context has the shape {tuple(context.shape)}, but this model takes at most "
                f"{places} vectors of width {width} (model.num_context)"
            )
