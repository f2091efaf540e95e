"""Embeddings service over one loaded model: request body in, response body out."""

import asyncio
import copy
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayembed.config.serving import Limits
from rayembed.config.types import Role
from rayembed.errors import DataError
from rayembed.models.contract import Tokens, cost
from rayembed.models.encoding import default_budget, encode_tokens
from rayembed.models.transformer_model import TransformerModel
from rayembed.registry.openai_schema import (
    EncodeOptions,
    RequestError,
    cut,
    encoded,
    read_encode_options,
    read_texts,
    response,
)
from rayembed.serving.batcher import Batcher

_TEXTS_PER_CALL = 64
"""Texts tokenised at once; a request that was given up ends between two calls."""
_FAILURES = 3
"""Failed batches in a row after which the service counts as broken."""


class ServiceError(Exception):
    """Refused request, with HTTP status and OpenAI's error type."""

    def __init__(
        self, status: int, message: str, *, field: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.field, self.code = status, field, code


@dataclass
class Counts:
    """Counters since the start."""

    requests: int = 0
    """Requests answered or in progress; refused ones are not counted."""
    texts: int = 0
    """Texts embedded; one that a request holds twice counts once."""
    tokens: int = 0
    truncated: int = 0
    """Texts of which the model did not read all tokens."""
    batches: int = 0
    """Encoder calls, one for all texts of a batch."""


class EmbeddingService:
    """Answers embeddings requests by a loaded model."""

    def __init__(
        self,
        name: str,
        model: TransformerModel,
        *,
        source: str = "",
        tokens_per_batch: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Create a service of a model that is on its device.

        Args:
            name: what requests call the model; `NAME:query` and `NAME:document` state the role,
                too.
            source: what was loaded, for those who ask.
            tokens_per_batch: of texts that are embedded together; None: 16384 on a GPU, 2048 on a
                CPU.
        """
        self.name, self.source = name, source
        self.limits = limits or Limits()
        self.counts = Counts()
        self._model = model
        self._created = int(time.time())
        self.waiting_texts = 0
        """Texts of requests that are not answered yet."""
        budget = tokens_per_batch or default_budget(next(model.parameters()).device)
        self._batcher = Batcher(self._embed_together, largest_batch=budget)

    @property
    def healthy(self) -> bool:
        """Whether the last batches did not all fail, as they do once a GPU is lost."""
        return self._batcher.failures < _FAILURES

    def describe(self) -> dict[str, Any]:
        """Model entry for OpenAI's list of models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "rayembed",
            "source": self.source,
            "dimensions": list(self._model.dimensions),
            "max_tokens": dict(self._model.tokenizer.max_lengths),
        }

    async def answer(self, body: Mapping[str, Any]) -> bytes:
        """JSON of the response to a request; see `registry.openai_schema` for both.

        Beside OpenAI's fields it has `truncated`: the indices of texts that were longer than the
        model reads. With `truncate` false in the request such texts are refused.

        Raises:
            ServiceError: the request does not hold (400, 404, 413), or cannot be answered now
                (503).
        """
        request = {key: value for key, value in body.items() if value is not None}
        self._read_name(request)
        try:
            options = read_encode_options(request, self._model.dimensions)
            texts = read_texts(request.get("input"))
        except RequestError as error:
            raise ServiceError(400, str(error), field=error.field) from None
        truncate = request.get("truncate", True)
        if not isinstance(truncate, bool):
            raise ServiceError(400, "truncate must be true or false", field="truncate")
        self._check_size(texts)
        if self.waiting_texts + len(texts) > self.limits.waiting_texts:
            raise ServiceError(503, f"{self.waiting_texts} texts wait already; try again later")
        self.waiting_texts += len(texts)
        try:
            return await self._embed(texts, options, truncate)
        except DataError as error:
            raise ServiceError(400, str(error), field="input") from None
        finally:
            self.waiting_texts -= len(texts)

    async def _embed(self, texts: list[str], options: EncodeOptions, truncate: bool) -> bytes:
        places: dict[str, int] = {}
        order = [places.setdefault(text, len(places)) for text in texts]
        tokens, whole = await self._tokenize(list(places), options)
        truncated = [i for i, place in enumerate(order) if whole[place] > cost(tokens[place])]
        if truncated and not truncate:
            first = order[truncated[0]]
            raise ServiceError(
                400,
                f"input[{truncated[0]}] has {whole[first]} tokens with its instruction and special "
                f"tokens; the model reads {cost(tokens[first])} of a {options.role}. Shorten it, "
                "or leave out truncate=false",
                field="input",
            )
        self.counts.requests += 1
        self.counts.truncated += len(truncated)
        own = [cost(one) for one in tokens]
        rows = await self._batcher(tokens, [n + self._model.added_tokens for n in own])
        return await asyncio.to_thread(
            _rendered, rows, order, options, self.name, sum(own[i] for i in order), truncated
        )

    async def _tokenize(
        self, texts: list[str], options: EncodeOptions
    ) -> tuple[list[Tokens], list[int]]:
        """Tokens of each text, and how many they were if the model read all of it.

        A text without a word of the model's is embedded by special tokens, as elsewhere.
        """
        tokens: list[Tokens] = []
        whole: list[int] = []
        for start in range(0, len(texts), _TEXTS_PER_CALL):
            part = texts[start : start + _TEXTS_PER_CALL]
            found, lengths = await asyncio.to_thread(_tokens, self._model, part, options)
            tokens += found
            whole += lengths
        return tokens, whole

    def _embed_together(self, batch: Sequence[Tokens]) -> list[np.ndarray]:
        """Vector (D,) of each text, of whatever role and instruction."""
        vectors = encode_tokens(self._model, batch)
        self.counts.batches += 1
        self.counts.texts += len(batch)
        self.counts.tokens += sum(cost(one) for one in batch)
        return list(vectors)

    def _read_name(self, request: dict[str, Any]) -> None:
        """Check the model's name; a role that stands in it becomes the field."""
        asked = request.get("model", self.name)
        role = asked.removeprefix(f"{self.name}:") if isinstance(asked, str) else None
        if asked == self.name:
            return
        if role not in ("query", "document"):
            raise ServiceError(
                404,
                f"there is no model {str(asked)[:80]!r} here; this server has {self.name!r}, "
                f"'{self.name}:query' and '{self.name}:document'",
                field="model",
                code="model_not_found",
            )
        if request.setdefault("role", role) != role:
            raise ServiceError(
                400, f"model {asked!r} and role {str(request['role'])[:80]!r} differ", field="role"
            )

    def _check_size(self, texts: Sequence[str]) -> None:
        if len(texts) > self.limits.texts:
            raise ServiceError(
                413,
                f"{len(texts)} texts in one request; allowed: {self.limits.texts}. Send them in "
                "parts",
                field="input",
            )
        for i, text in enumerate(texts):
            if len(text) > self.limits.characters:
                raise ServiceError(
                    413,
                    f"input[{i}] has {len(text)} characters; allowed: {self.limits.characters}",
                    field="input",
                )


def _tokens(
    model: TransformerModel, texts: list[str], options: EncodeOptions
) -> tuple[list[Tokens], list[int]]:
    """Tokens of each text as the model reads them, and how many all of it would be."""
    role: Role = options.role
    instruction = model.instruction_of(role, options.instruction)

    def read(tokenizer: Any, some: list[str]) -> list[Tokens]:
        instructions = [instruction] * len(some) if instruction else None
        found: list[Tokens] = tokenizer(some, role, instructions, allow_empty=True)
        return found

    tokens = read(model.tokenizer, texts)
    lengths = [cost(one) for one in tokens]
    # Whatever was cut is as long as may be; what is as long may have been cut.
    full = [i for i, n in enumerate(lengths) if n >= model.tokenizer.max_lengths[role]]
    if full:
        unlimited = copy.copy(model.tokenizer)
        unlimited.max_lengths = dict.fromkeys(model.tokenizer.max_lengths, 2**31)
        for i, one in zip(full, read(unlimited, [texts[i] for i in full]), strict=True):
            lengths[i] = cost(one)
    return tokens, lengths


def _rendered(
    rows: Sequence[np.ndarray],
    order: Sequence[int],
    options: EncodeOptions,
    name: str,
    num_tokens: int,
    truncated: list[int],
) -> bytes:
    """JSON of a response, one vector after the other: `json` holds Python's lock while it writes
    one value, and the event loop waits for it.
    """
    vectors = cut(np.stack(rows), options.dimensions)
    made = [json.dumps(encoded(vector, options.encoding_format)) for vector in vectors]
    head = {**response([], model=name, num_tokens=num_tokens), "truncated": truncated}
    data = ", ".join(
        f'{{"object": "embedding", "index": {i}, "embedding": {made[place]}}}'
        for i, place in enumerate(order)
    )
    return json.dumps(head).replace('"data": []', f'"data": [{data}]', 1).encode()
