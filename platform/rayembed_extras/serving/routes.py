"""Routes that embed or rank texts: parse requests, and build the answers from vectors.

A route reads a request into texts in their roles, and says what their vectors become. Everything
between is the same for all of them: see `service`.
"""

import json
import reprlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
from tokenizers import Tokenizer

from rayembed.assets.resolver import resolve
from rayembed.config.types import Role
from rayembed.errors import AssetError
from rayembed.registry.indexes import IndexSearch, IndexSpace, SearchMode
from rayembed.registry.openai_schema import (
    ROLES,
    EncodeOptions,
    RequestError,
    encoded,
    read_encode_options,
    read_texts,
    response,
)
from rayembed_extras.serving.served_index import ServedIndex


class Text(NamedTuple):
    """A text to embed."""

    text: str
    role: Role
    where: str
    """Position of the text in the request, for messages."""


@dataclass(frozen=True)
class Embedded:
    """Vectors of a request's texts."""

    vectors: np.ndarray
    """(M, D) float32 unit vectors, one for each distinct text."""
    order: Sequence[int]
    """Row in `vectors` of each text."""
    num_tokens: int
    truncated: Sequence[int]
    """Indices of texts longer than the model's maximum length."""
    space: IndexSpace | None = None
    """Space of the index to which the vectors belong; None: of no index."""
    scores: np.ndarray | None = None
    """(N,) scores of a ranking's documents by a reranker, before a sigmoid; None: cosines of the
    vectors rank them."""


class Call(NamedTuple):
    """A parsed request: its texts, their encode options, and a function that writes the answer."""

    texts: list[Text]
    options: EncodeOptions
    """Options of all texts; in a ranking, documents have their own role and instruction."""
    truncate: bool
    """Whether texts that are too long for the model are cut instead of refused."""
    answer: Callable[[Embedded], Iterable[str]]
    """Parts of the JSON answer. Short ones: `json` holds Python's lock while it writes one."""
    for_index: bool = True
    """Whether the vectors shall belong to the served model's index, if it has one: not those of a
    ranking, which compares its texts with each other."""
    ranks: bool = False
    """Whether the call ranks its other texts by its first one."""
    searches: bool = False
    """Whether `answer` searches the index, and so waits for its store."""


@dataclass(frozen=True)
class Offer:
    """Properties of the served model that routes need to parse requests."""

    name: str
    dimensions: Sequence[int]
    token_arrays: Tokenizer | None = None
    index: ServedIndex | None = None
    """Index to which the model's vectors belong."""
    results: int = 1000
    """Maximum results of a search for one query."""


Route = Callable[[Mapping[str, Any], Offer], Call]


def embeddings(request: Mapping[str, Any], offer: Offer) -> Call:
    """Parse a request to OpenAI's `/v1/embeddings`. Beside its fields the answer has
    `truncated`.
    """
    options = read_encode_options(_with_role(request), offer.dimensions)

    def answer(found: Embedded) -> Iterator[str]:
        head = response([], model=offer.name, num_tokens=found.num_tokens)
        before, _, after = json.dumps({**head, "truncated": found.truncated}).partition("[]")
        yield before + "["
        made = [json.dumps(encoded(vector, options.encoding_format)) for vector in found.vectors]
        for i, place in enumerate(found.order):
            comma = ", " if i else ""
            yield f'{comma}{{"object": "embedding", "index": {i}, "embedding": {made[place]}}}'
        yield "]" + after

    texts = _texts(request, "input", options.role, offer)
    return Call(texts, options, _flag(request, "truncate", True), answer)


def embed(request: Mapping[str, Any], offer: Offer) -> Call:
    """Parse a request to Text Embeddings Inference's `/embed`, whose answer is a list of vectors
    for `inputs`.
    """
    _check_right(request)
    if not _flag(request, "normalize", True):
        raise RequestError(
            "normalize = false is not supported, because this server gives vectors of length 1 "
            "only; leave normalize out",
            "normalize",
        )
    prompt = request.get("prompt_name")
    if prompt is not None and prompt not in ROLES:
        allowed = ", ".join(ROLES)
        raise RequestError(f"prompt_name = {prompt!r:.80}; allowed: {allowed}", "prompt_name")
    named = {**request, "role": prompt} if prompt else dict(request)
    options = read_encode_options(_with_role(named), offer.dimensions)

    def answer(found: Embedded) -> Iterator[str]:
        made = [json.dumps(encoded(vector, options.encoding_format)) for vector in found.vectors]
        for i, place in enumerate(found.order):
            yield f"{', ' if i else '['}{made[place]}"
        yield "]"

    texts = _texts(request, "inputs", options.role, offer)
    return Call(texts, options, _flag(request, "truncate", True), answer)


def rerank(request: Mapping[str, Any], offer: Offer) -> Call:
    """Parse a request to Text Embeddings Inference's `/rerank`, which ranks `texts` by their
    similarity to `query`.
    """
    _check_right(request)
    raw = _flag(request, "raw_scores", False)
    shown = _flag(request, "return_text", False)
    texts = _texts(request, "texts", "document", offer)

    def answer(found: Embedded) -> Iterator[str]:
        ranked: list[dict[str, Any]] = []
        for i, score, relevance in _ranked(found):
            ranked.append({"index": i, "score": score if raw else relevance})
            if shown:
                ranked[-1]["text"] = texts[i].text
        yield json.dumps(ranked)

    return _ranking(request, texts, offer, answer)


def rank_documents(request: Mapping[str, Any], offer: Offer) -> Call:
    """Parse a ranking request as Cohere and Jina define it: the `top_n` of `documents` by
    similarity to `query`.
    """
    shown = _flag(request, "return_documents", False)
    given = request.get("documents")
    if isinstance(given, list):
        given = [one.get("text") if isinstance(one, dict) else one for one in given]
    texts = _texts({"documents": given}, "documents", "document", offer)
    top = request.get("top_n", len(texts))
    if type(top) is not int or top < 1:
        raise RequestError(f"top_n = {top!r:.80} must be a whole number, 1 or more", "top_n")

    def answer(found: Embedded) -> Iterator[str]:
        results: list[dict[str, Any]] = []
        for i, _, relevance in _ranked(found)[:top]:
            results.append({"index": i, "relevance_score": relevance})
            if shown:
                results[-1]["document"] = {"text": texts[i].text}
        usage = {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens}
        reply = {"id": str(uuid.uuid4()), "model": offer.name, "results": results, "usage": usage}
        yield json.dumps(reply)

    return _ranking(request, texts, offer, answer)


def search(request: Mapping[str, Any], offer: Offer) -> Call:
    """Parse a search of the served model's index: the `k` best rows for each `query`."""
    index = offer.index
    if index is None:
        raise RequestError(
            f"the model {offer.name!r} has no index here; start the server with --set "
            f"models.{offer.name}.index=INDEX",
            "model",
        )
    for field in ("filter", "dimensions"):
        if field in request:
            raise RequestError(
                f"{field} is not offered: /search takes query, k, mode, instruction and truncate; "
                "filters are set in the store's own client",
                field,
            )
    role = _with_role(request).get("role", "query")
    if role != "query":
        raise RequestError(f"role = {reprlib.repr(role)}; a search embeds queries", "role")
    options = read_encode_options({**request, "role": "query"}, offer.dimensions)
    k = request.get("k", min(10, offer.results))
    if type(k) is not int or not 1 <= k <= offer.results:
        raise RequestError(
            f"k = {k!r:.80} must be a whole number from 1 to {offer.results} (limits.results)", "k"
        )
    mode = request.get("mode", "dense")
    if mode not in get_args(SearchMode):
        allowed = ", ".join(get_args(SearchMode))
        raise RequestError(f"mode = {reprlib.repr(mode)}; allowed: {allowed}", "mode")
    texts = _texts(request, "query", "query", offer)

    def answer(found: Embedded) -> Iterator[str]:
        space = found.space
        assert space is not None
        words = [one.text for one in texts]
        wanted = IndexSearch(found.vectors[list(found.order)], words, k, mode)
        hits = index.search(space, wanted)
        head = {"model": offer.name, "index": space.name, "table": space.table, "mode": mode}
        usage = {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens}
        more = {"usage": usage, "truncated": list(found.truncated), "data": []}
        before, _, after = json.dumps({**head, **more}).rpartition("[]")
        yield before + "["
        for i, of_query in enumerate(hits):
            rows = [hit._asdict() for hit in of_query]
            results = json.dumps(rows, default=_plain, ensure_ascii=False, allow_nan=False)
            yield f'{", " if i else ""}{{"query": {i}, "results": {results}}}'
        yield "]" + after

    return Call(texts, options, _flag(request, "truncate", True), answer, searches=True)


ROUTES: Mapping[str, Route] = {
    "/v1/embeddings": embeddings,
    "/embed": embed,
    "/rerank": rerank,
    "/v1/rerank": rank_documents,
    "/v2/rerank": rank_documents,
    "/search": search,
}
"""Path → parser of its requests."""


def _ranking(
    request: Mapping[str, Any],
    texts: list[Text],
    offer: Offer,
    answer: Callable[[Embedded], Iterable[str]],
) -> Call:
    """Build the call that embeds the query and the documents and ranks them."""
    query = request.get("query")
    if not isinstance(query, str):
        raise RequestError(f"query = {query!r:.80} must be a text", "query")
    if ":" in request.get("model", ""):
        raise RequestError(
            f"model = {request['model']!r:.80} names a role, but a ranking sets the roles of its "
            "texts itself: leave out ':' and the role",
            "model",
        )
    (asked,) = read_texts([query], "query")
    options = read_encode_options({**request, "role": "query"}, offer.dimensions)
    truncate = _flag(request, "truncate", True)
    every = [Text(asked, "query", "query"), *texts]
    return Call(every, options, truncate, answer, for_index=False, ranks=True)


def _ranked(found: Embedded) -> list[tuple[int, float, float]]:
    """Rank documents, best first, as (index, score, relevance from 0 to 1); ties keep their order.

    By cosines c, with the relevance (1 + c) / 2, or by a reranker's scores s, with the sigmoid of
    s. Each row is summed alone: a product of matrices rounds equal rows otherwise at other places.
    """
    if found.scores is None:
        query, *documents = found.order
        products = (found.vectors * found.vectors[query]).sum(axis=1)
        scores = np.clip(products, -1, 1)[documents]
        relevance = (1 + scores) / 2
    else:
        scores = found.scores.astype(np.float64)
        relevance = 1 / (1 + np.exp(-scores))
    best = np.argsort(-scores, kind="stable")
    return [(int(i), float(scores[i]), float(relevance[i])) for i in best]


def _texts(request: Mapping[str, Any], field: str, role: Role, offer: Offer) -> list[Text]:
    value = arrays_as_texts(request.get(field), field, offer.token_arrays)
    several = not isinstance(value, str)
    return [
        Text(text, role, f"{field}[{i}]" if several else field)
        for i, text in enumerate(read_texts(value, field))
    ]


def _with_role(request: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the request, with the role taken from the end of the model's name if it has one."""
    role = str(request.get("model", "")).partition(":")[2]
    if role and request.get("role", role) != role:
        raise RequestError(
            f"model {request['model']!r:.80} and role {request['role']!r:.80} name different "
            "roles; give the role once",
            "role",
        )
    return {**request, "role": role} if role else dict(request)


def _plain(value: Any) -> str:
    """Write a metadata value that JSON lacks, such as a date."""
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _flag(request: Mapping[str, Any], field: str, default: bool) -> bool:
    value = request.get(field, default)
    if not isinstance(value, bool):
        raise RequestError(f"{field} = {value!r:.80} must be true or false", field)
    return value


def _check_right(request: Mapping[str, Any]) -> None:
    side = request.get("truncation_direction", "right")
    if str(side).lower() != "right":
        raise RequestError(
            f"truncation_direction = {side!r:.80} is not supported, because this server cuts "
            "texts at their right end; leave truncation_direction out",
            "truncation_direction",
        )


_REFUSED = (
    "token ids are not accepted, because nothing says which tokenizer made them; send texts "
    "(LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False), or name the tokenizer "
    "in the server's setting token_arrays"
)


def model_tokenizer(model: Any) -> Tokenizer:
    """Return the loaded model's own tokenizer, without its prompts."""
    found: Tokenizer = model.tokenizer.pretrained.backend_tokenizer
    return found


def named_tokenizer(reference: str) -> Tokenizer:
    """Load a tokenizer from a tokenizer.json: the file, or a folder that contains it.

    Raises:
        AssetError: there is none.
    """
    path = resolve(reference)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise AssetError(
            f"token_arrays = {reference!r} has no tokenizer.json that can be read: {error}"
        ) from error


def arrays_as_texts(value: Any, field: str, tokenizer: Tokenizer | None) -> Any:
    """Replace each array of token numbers by its text; other content is unchanged.

    Special tokens are left out: the model puts its own around a text.

    Args:
        value: of the field: one array, or a list of arrays and texts.
        tokenizer: of the numbers; None: they are refused.

    Raises:
        RequestError: numbers without a tokenizer, or one that it does not have.
    """
    if not isinstance(value, list) or not value:
        return value
    if isinstance(value[0], int):
        return [_text(value, f"{field} = ", field, tokenizer)]
    return [
        _text(one, f"{field}[{i}] = ", field, tokenizer) if isinstance(one, list) else one
        for i, one in enumerate(value)
    ]


def _text(ids: list[Any], where: str, field: str, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        raise RequestError(f"{where}{reprlib.repr(ids)}: {_REFUSED}", field)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    for number in ids:
        if type(number) is not int or not 0 <= number < size:
            raise RequestError(
                f"{where}{reprlib.repr(ids)} has {reprlib.repr(number)}, which is not a token id: "
                f"the tokenizer of this server's setting token_arrays has the ids 0 to {size - 1}",
                field,
            )
    found: str = tokenizer.decode(ids, skip_special_tokens=True)
    return found
