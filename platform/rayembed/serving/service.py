"""Embeddings service over one loaded model: request body in, response body out."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rayembed.config.serving import Limits
from rayembed.config.types import Role
from rayembed.errors import DataError
from rayembed.models.contract import EmbeddingModel, cost
from rayembed.models.encoding import encode
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

State = Literal["loading", "ready", "failed"]

_logger = logging.getLogger(__name__)


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
    batches: int = 0
    """Encoder calls, one for all waiting texts of the same role and instruction."""


@dataclass(frozen=True)
class _EmbedItem:
    """Texts of one request with their embedding options."""

    texts: tuple[str, ...]
    role: Role
    instruction: str


class EmbeddingService:
    """Answers embeddings requests once its model is loaded, and reports that it is loading until
    then.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], EmbeddingModel],
        *,
        source: str = "",
        tokens_per_batch: int = 16_384,
        limits: Limits | None = None,
    ) -> None:
        """Create a service without loading its model; see `start_loading`.

        Args:
            name: what requests call the model.
            load: the model on its device, ready to embed.
            source: what was loaded, for those who ask.
            tokens_per_batch: of requests that are embedded together.
        """
        self.name, self.source = name, source
        self.limits = limits or Limits()
        self.counts = Counts()
        self.state: State = "loading"
        self.failure = ""
        self._load = load
        self._model: EmbeddingModel | None = None
        self._created = int(time.time())
        self._waiting_texts = 0
        self._batcher = Batcher(self._embed_together, largest_batch=tokens_per_batch)

    def start_loading(self) -> threading.Thread:
        """Load the model in a thread, which is returned; requests meanwhile are told to retry
        later.
        """
        thread = threading.Thread(target=self._load_model, name="loading", daemon=True)
        thread.start()
        return thread

    def describe(self) -> dict[str, Any]:
        """Model entry for OpenAI's list of models."""
        widths = list(self._model.dimensions) if self._model is not None else []
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "rayembed",
            "source": self.source,
            "dimensions": widths,
        }

    async def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Response to a request; see `registry.openai_schema` for both.

        Raises:
            ServiceError: the request does not hold (400, 404, 413), or cannot be answered now
                (503).
        """
        model = self._loaded()
        request = {key: value for key, value in body.items() if value is not None}
        self._check_name(request.get("model"))
        try:
            options = read_encode_options(request, model.dimensions)
            texts = read_texts(request.get("input"))
        except RequestError as error:
            raise ServiceError(400, str(error), field=error.field) from None
        self._check_size(texts)
        if self._waiting_texts + len(texts) > self.limits.waiting_texts:
            raise ServiceError(503, f"{self._waiting_texts} texts wait already; try again later")
        self._waiting_texts += len(texts)
        try:
            return await self._embed(model, texts, options)
        except DataError as error:
            raise ServiceError(400, str(error), field="input") from None
        finally:
            self._waiting_texts -= len(texts)

    async def _embed(
        self, model: EmbeddingModel, texts: list[str], options: EncodeOptions
    ) -> dict[str, Any]:
        instruction = model.instruction_of(options.role, options.instruction)
        asked = _EmbedItem(tuple(texts), options.role, instruction)
        num_tokens = await asyncio.to_thread(_num_tokens, model, asked)
        self.counts.requests += 1
        vectors = cut(await self._batcher(asked, num_tokens), options.dimensions)
        embeddings = [encoded(vector, options.encoding_format) for vector in vectors]
        return response(embeddings, model=self.name, num_tokens=num_tokens)

    def _embed_together(self, batch: Sequence[_EmbedItem]) -> list[np.ndarray]:
        """Vectors (texts of the request, D) of each request; one encoder call for equal options."""
        model = self._loaded()
        found: list[np.ndarray] = [np.empty(0)] * len(batch)
        for role, instruction in dict.fromkeys((one.role, one.instruction) for one in batch):
            alike = [
                i
                for i, one in enumerate(batch)
                if (one.role, one.instruction) == (role, instruction)
            ]
            texts = [text for i in alike for text in batch[i].texts]
            # Texts without a word of the model's are embedded by special tokens, as elsewhere.
            vectors = encode(model, texts, role=role, instruction=instruction, allow_empty=True)
            ends = np.cumsum([len(batch[i].texts) for i in alike])
            for i, part in zip(alike, np.split(vectors, ends[:-1]), strict=True):
                found[i] = part
            self.counts.batches += 1
            self.counts.texts += len(texts)
        return found

    def _loaded(self) -> EmbeddingModel:
        if self._model is None:
            told = f"the model could not be loaded: {self.failure}"
            raise ServiceError(503, told if self.failure else "the model is being loaded")
        return self._model

    def _load_model(self) -> None:
        try:
            self._model = self._load()
        except Exception as error:
            self.failure = str(error) or repr(error)
            self.state = "failed"
            _logger.exception("the model %s could not be loaded", self.source)
        else:
            self.state = "ready"

    def _check_name(self, asked: Any) -> None:
        if asked is not None and asked != self.name:
            raise ServiceError(
                404,
                f"there is no model {asked!r} here; this server has {self.name!r}",
                field="model",
                code="model_not_found",
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


def _num_tokens(model: EmbeddingModel, asked: _EmbedItem) -> int:
    """Number of tokens that the model reads for a request, including instruction and special
    tokens.
    """
    instructions = [asked.instruction] * len(asked.texts) if asked.instruction else None
    tokens = model.tokenizer(asked.texts, asked.role, instructions, allow_empty=True)
    return sum(cost(one) for one in tokens)
