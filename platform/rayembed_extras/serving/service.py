"""Answer embedding requests with one loaded model: request body in, response body out."""

import asyncio
import copy
import itertools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from tokenizers import Tokenizer

from rayembed.config.types import Role
from rayembed.errors import ArtifactError, DataError
from rayembed.models.contract import Tokens, cost
from rayembed.models.passes.encoding import default_budget, encode_tokens, no_unit_vectors
from rayembed.models.transformer_model import TransformerModel
from rayembed.proof.check import changed_packages, check, tolerated
from rayembed.proof.proof import ProofText, read_proof
from rayembed.registry.indexes import IndexEntry, IndexSpace, NamedIndex
from rayembed.registry.openai_schema import EncodeOptions, RequestError
from rayembed_extras.serving.batcher import Batcher
from rayembed_extras.serving.routes import ROUTES, Call, Embedded, Offer, Text
from rayembed_extras.serving.served_index import (
    IndexUnusableError,
    ServedIndex,
    fits,
    header,
    placed,
    with_instruction,
)
from rayembed_extras.serving.settings import Limits

_TEXTS_PER_CALL = 64
"""Number of texts tokenised at once; a cancelled request stops between two calls."""
_logger = logging.getLogger(__name__)

_LONGEST_ON_CPU = 4_000
"""Characters up to which a CPU embeds texts of the proof at the start."""
_FAILURES = 3
"""Consecutive failed batches after which the service counts as broken."""


class ServiceError(Exception):
    """Refused request, with HTTP status and OpenAI's error code."""

    def __init__(
        self, status: int, message: str, field: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(status, message, field, code)  # by which it is unpickled
        self.status, self.message, self.field, self.code = status, message, field, code

    def __str__(self) -> str:
        return self.message


class State(NamedTuple):
    """Health and counters of a served model."""

    healthy: bool
    totals: dict[str, int]
    """Counters since the start."""
    waiting_texts: int
    """Number of texts of unanswered requests."""
    proof_cosine: float | None = None
    """Lowest cosine with the vectors of the model's proof, at the start; None: not compared."""
    differs: str = ""
    """Reason why the vectors are not those of the proof, or do not belong to the model's index;
    empty if they do, or there is none."""


class Answer(NamedTuple):
    """Body of a response as bytes, with the number of texts that were cut."""

    content: bytes
    truncated: int
    """Number of texts longer than the model's maximum length."""
    belongs_to: str = ""
    """Index to which the vectors belong as they are, or that was searched, with its table and
    adapter; empty: none."""


@dataclass
class Counts:
    """Counters of requests, texts and tokens since the service started."""

    requests: int = 0
    """Requests answered or in progress; refused ones are not counted."""
    texts: int = 0
    """Number of embedded texts; a text repeated within a request counts once."""
    tokens: int = 0
    truncated: int = 0
    """Number of texts cut to the model's maximum length."""
    batches: int = 0
    """Encoder calls, one for all texts of a batch."""


class Served(Protocol):
    """Interface of a served model in this or another process."""

    async def answer(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Answer a request to one of `routes.ROUTES`; raises `ServiceError` for refused
        requests.
        """
        ...

    async def describe(self) -> dict[str, Any]:
        """Return the model's entry in OpenAI's list of models."""
        ...

    async def state(self) -> State:
        """Return the current health and counters."""
        ...


class EmbeddingService:
    """Answers embedding requests with a loaded model."""

    def __init__(
        self,
        name: str,
        model: TransformerModel,
        *,
        source: str = "",
        tokens_per_batch: int | None = None,
        token_arrays: Tokenizer | None = None,
        limits: Limits | None = None,
        folder: Path | None = None,
        index: NamedIndex | None = None,
        named_indexes: Sequence[IndexEntry] = (),
    ) -> None:
        """Create a service for a model that is on its device.

        Args:
            name: what requests call the model.
            source: what was loaded, for those who ask.
            tokens_per_batch: of texts that are embedded together; None: 16384 on a GPU, 2048 on a
                CPU.
            token_arrays: of token numbers in requests; None: they are refused.
            folder: of the model, whose proof its vectors are compared with; None: they are not.
            index: to which the vectors shall belong; None: none.
            named_indexes: further indexes of the model's version, by the registry.
        """
        self.name, self.source = name, source
        self.limits = limits or Limits()
        self.counts = Counts()
        self._model = model
        self._index = ServedIndex(index, named_indexes, search_seconds=self.limits.request_seconds)
        own = None if index is None else self._index
        self._offer = Offer(name, model.dimensions, token_arrays, own, self.limits.results)
        self._created = int(time.time())
        self.waiting_texts = 0
        """Texts of requests that are not answered yet."""
        self._proof_cosine: float | None = None
        self._differs = ""
        budget = tokens_per_batch or default_budget(model.device)
        self._batcher = Batcher(self._embed_together, largest_batch=budget)
        if folder is not None:
            self._check_proof(folder)
        if problem := self._index.problem():
            _logger.error("%s is not ready: %s", name, problem)

    @property
    def healthy(self) -> bool:
        """Whether a recent batch succeeded; all batches fail once a GPU is lost."""
        return self._batcher.failures < _FAILURES

    async def state(self) -> State:
        """Return the model's current health and counters."""
        counts = asdict(self.counts)
        differs = self._differs or await asyncio.to_thread(self._index.problem)
        return State(self.healthy, counts, self.waiting_texts, self._proof_cosine, differs)

    def _check_proof(self, folder: Path) -> None:
        """Embed the texts of the model's proof (reference vectors) as requests are, and store
        whether the vectors agree.

        A folder without a proof is served with a warning.
        """
        try:
            proof = read_proof(folder)
        except ArtifactError as error:
            self._differs = str(error)
        else:
            if proof is None:
                _logger.warning(
                    "%s has no stored reference vectors (proof/), so the server cannot check "
                    "that its vectors are those of the original model; register or export the "
                    "model again to store them",
                    self.name,
                )
                return
            if self._model.device.type == "cpu":  # long texts would take it minutes
                lengths = (len(one.text) for one in proof.texts)
                proof = proof.part([i for i, n in enumerate(lengths) if n <= _LONGEST_ON_CPU])
            computed: Any = self._model.number_type
            checked = check(proof, self._embed_proof, tolerated(proof, computed))
            self._proof_cosine = checked.worst
            if not checked.same:
                about = proof.texts[checked.wrong[0]].about
                self._differs = (
                    f"{len(checked.wrong)} of {len(proof.texts)} texts of the model's stored "
                    "reference vectors (proof/) have other vectors here (lowest cosine "
                    f"{checked.worst:.4f}, allowed {checked.tolerance:g}), such as {about!r}; "
                    "rayembed verify names the mistake"
                )
                if changed := changed_packages(proof):
                    self._differs += f"; {changed}"
        if self._differs:
            _logger.error("%s is not ready: %s", self.name, self._differs)

    def _embed_proof(self, texts: Sequence[ProofText]) -> np.ndarray:
        """Compute (N, D) vectors of the proof's texts, each with its role and instruction."""
        tokens = [
            _tokens(self._model, [one.text], one.role, one.instruction)[0][0] for one in texts
        ]
        return encode_tokens(self._model, tokens)

    async def describe(self) -> dict[str, Any]:
        """Return the model's entry in OpenAI's list of models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "rayembed",
            "source": self.source,
            "dimensions": list(self._model.dimensions),
            "max_tokens": dict(self._model.tokenizer.max_lengths),
            "indexes": await asyncio.to_thread(self._index.described),
        }

    async def answer(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Answer a request to one of `routes.ROUTES`.

        Raises:
            ServiceError: the request does not hold (400, 413), or cannot be answered now (503).
        """
        request = {key: value for key, value in body.items() if value is not None}
        try:
            call = await asyncio.to_thread(ROUTES[path], request, self._offer)
        except RequestError as error:
            raise ServiceError(400, str(error), field=error.field) from None
        texts = call.texts
        self._check_size(texts)
        if self.waiting_texts + len(texts) > self.limits.waiting_texts:
            raise ServiceError(503, f"{self.waiting_texts} texts wait already; try again later")
        self.waiting_texts += len(texts)
        try:
            embedded = await self._embed(call)
            write = partial(_joined, call.answer(embedded))
            if call.searches:
                content = await self._index.in_search_thread(write)
            else:
                content = await asyncio.to_thread(write)
        except RequestError as error:
            raise ServiceError(400, str(error), field=error.field) from None
        except DataError as error:
            raise ServiceError(400, str(error), field=_field(texts[-1])) from None
        except IndexUnusableError as error:
            raise ServiceError(503, str(error)) from None
        finally:
            self.waiting_texts -= len(texts)
        return Answer(content, len(embedded.truncated), self._belongs_to(call, embedded.space))

    def _belongs_to(self, call: Call, space: IndexSpace | None) -> str:
        """Describe the index to which an answer's vectors belong, or that was searched."""
        if space is None:
            return ""
        role, given = call.options.role, call.options.instruction
        own = self._model.instruction_of(role, space.instruction_of(role))
        as_own = given is None or self._model.instruction_of(role, given) == own
        return header(space) if call.searches or (as_own and fits(call.options, space)) else ""

    async def _embed(self, call: Call) -> Embedded:
        options, space = call.options, None
        if call.for_index:
            space = await asyncio.to_thread(self._index.space, options)
        options = with_instruction(options, space)
        places: dict[tuple[str, Role], int] = {}
        order = [places.setdefault((one.text, one.role), len(places)) for one in call.texts]
        tokens, whole = await self._tokenize(list(places), options)
        truncated = [i for i, place in enumerate(order) if whole[place] > cost(tokens[place])]
        if truncated and not call.truncate:
            first, place = call.texts[truncated[0]], order[truncated[0]]
            raise ServiceError(
                400,
                f"{first.where} has {whole[place]} tokens with its instruction and special tokens; "
                f"the model reads {cost(tokens[place])} of a {first.role}. Shorten it, or leave "
                "out truncate=false",
                field=_field(first),
            )
        self.counts.requests += 1
        self.counts.truncated += len(truncated)
        own = [cost(one) for one in tokens]
        rows = await self._batcher(tokens, [n + self._model.added_tokens for n in own])
        vectors = placed(np.stack(rows), options, space)
        if len(no_unit_vectors(vectors)):  # the numbers that are left may all be zero
            raise no_vector()
        return Embedded(vectors, order, sum(own[i] for i in order), truncated, space)

    async def _tokenize(
        self, texts: list[tuple[str, Role]], options: EncodeOptions
    ) -> tuple[list[Tokens], list[int]]:
        """Tokenise texts as the model reads them; also return each text's length before it
        is cut.

        A text without a word of the model's is embedded by special tokens, as elsewhere.
        """
        tokens: list[Tokens] = []
        whole: list[int] = []
        for role, group in itertools.groupby(texts, key=itemgetter(1)):
            instruction = options.instruction if role == options.role else None
            own = [text for text, _ in group]
            for start in range(0, len(own), _TEXTS_PER_CALL):
                part = own[start : start + _TEXTS_PER_CALL]
                found, lengths = await asyncio.to_thread(
                    _tokens, self._model, part, role, instruction
                )
                tokens += found
                whole += lengths
        return tokens, whole

    def _embed_together(self, batch: Sequence[Tokens]) -> list[np.ndarray | BaseException]:
        """Embed texts of any roles and instructions in one batch; return a vector (D,) or an error
        for each.
        """
        vectors = encode_tokens(self._model, batch)
        self.counts.batches += 1
        self.counts.texts += len(batch)
        self.counts.tokens += sum(cost(one) for one in batch)
        found: list[np.ndarray | BaseException] = list(vectors)
        for i in no_unit_vectors(vectors):
            found[i] = no_vector()
        if wrong := sum(isinstance(one, BaseException) for one in found):
            _logger.error(
                "%s: the model returned vectors that are not of length 1 for %d of %d texts",
                self.name,
                wrong,
                len(found),
            )
        return found

    def _check_size(self, texts: Sequence[Text]) -> None:
        if len(texts) > self.limits.texts:
            raise ServiceError(
                413,
                f"{len(texts)} texts in one request; allowed: {self.limits.texts}. Send them in "
                "parts",
                field=_field(texts[-1]),
            )
        for one in texts:
            if len(one.text) > self.limits.characters:
                raise ServiceError(
                    413,
                    f"{one.where} has {len(one.text)} characters; allowed: "
                    f"{self.limits.characters}",
                    field=_field(one),
                )


def no_vector() -> ServiceError:
    """Make the error of a text for which the model gives no finite numbers."""
    return ServiceError(
        500,
        "the model gives numbers that are not finite, or all zero, for a text of this request: its "
        "weights are damaged, or overflow in its number type",
    )


def _field(text: Text) -> str:
    return text.where.partition("[")[0]


def _tokens(
    model: TransformerModel, texts: list[str], role: Role, given: str | None
) -> tuple[list[Tokens], list[int]]:
    """Tokenise texts as the model reads them; also return each text's length before it is cut."""
    instruction = model.instruction_of(role, given)

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


def _joined(parts: Iterable[str]) -> bytes:
    return "".join(parts).encode()
