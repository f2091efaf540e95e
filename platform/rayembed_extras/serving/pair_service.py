"""Answer ranking requests with a reranker, which scores each document together with the query."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from rayembed.models.contract import Tokens, cost
from rayembed.models.passes.encoding import encode_tokens
from rayembed_extras.serving.routes import Call, Embedded
from rayembed_extras.serving.service import EmbeddingService, ServiceError, no_vector

_PAIRS_AT_A_TIME = 64
"""Pairs tokenised at once; a cancelled request stops between two calls."""


class PairService(EmbeddingService):
    """Answers ranking requests with a loaded reranker; requests for vectors are refused.

    The model's tokenizer has `of_pairs`, whose tokens say by `cut` how many were left out.
    """

    async def _embed(self, call: Call) -> Embedded:
        """Score the query, the call's first text, with each of the others."""
        if not call.ranks:
            raise ServiceError(
                400,
                f"the model {self.name!r} is a reranker, which gives no vectors; send the query "
                "with its documents to /rerank, /v1/rerank or /v2/rerank",
                field="model",
            )
        query, *documents = (one.text for one in call.texts)
        pairs = [(query, document) for document in documents]
        places = {pair: place for place, pair in enumerate(dict.fromkeys(pairs))}
        distinct, tokenizer = list(places), self._pair_tokenizer
        tokens: list[Tokens] = []
        for start in range(0, len(distinct), _PAIRS_AT_A_TIME):
            part = distinct[start : start + _PAIRS_AT_A_TIME]
            tokens += await asyncio.to_thread(tokenizer.of_pairs, part)
        order = [places[pair] for pair in pairs]
        truncated = [i for i, place in enumerate(order) if tokens[place]["cut"][0]]
        if truncated and not call.truncate:
            raise ServiceError(
                400,
                f"{call.texts[truncated[0] + 1].where} is too long with its query: the model reads "
                f"{tokenizer.max_lengths['document']} tokens of both. Shorten it, or leave out "
                "truncate=false",
                field="texts",
            )
        self.counts.requests += 1
        self.counts.truncated += len(truncated)
        costs = [cost(one) for one in tokens]
        scores = np.concatenate(await self._batcher(tokens, costs))[order]
        num_tokens = sum(costs[place] for place in order)
        return Embedded(np.empty((0, 1)), order, num_tokens, truncated, scores=scores)

    @property
    def _pair_tokenizer(self) -> Any:
        return self._model.tokenizer

    def _embed_together(self, batch: Sequence[Tokens]) -> list[np.ndarray | BaseException]:
        """Score pairs in one batch; return a score (1,) or an error for each."""
        scores = encode_tokens(self._model, batch)
        self.counts.batches += 1
        self.counts.texts += len(batch)
        self.counts.tokens += sum(cost(one) for one in batch)
        return [score if np.isfinite(score).all() else no_vector() for score in scores]
