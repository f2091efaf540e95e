"""Requests and responses of OpenAI's embeddings API, extended by a role and an instruction.

One reading of it for the registered MLflow model and for the server, so that both take and refuse
the same. Travels with the registered model as code: knows neither MLflow nor torch.
"""

import base64
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from rayembed.config.types import has_content, is_unicode
from rayembed.machine.quantisation import to_bits, to_int8

Role = Literal["query", "document"]

ROLES: tuple[Role, ...] = ("query", "document")
FORMATS = ("float", "base64", "int8", "uint8", "binary", "ubinary")
"""Values of `encoding_format`; see `encoded`."""


class RequestError(ValueError):
    """A request is invalid; the message states the given value and the allowed ones."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field
        """Request field at fault."""

    def __reduce__(self) -> tuple[type["RequestError"], tuple[str, str]]:
        return type(self), (str(self), self.field)


class EncodeOptions(NamedTuple):
    """Embedding options of a request; texts with equal options are embedded together."""

    role: Role
    instruction: str | None
    """Instruction; None selects the model's default, if any."""
    dimensions: int | None
    """Width of the vectors; None for the full one."""
    encoding_format: str


def read_encode_options(request: Mapping[str, Any], widths: Sequence[int]) -> EncodeOptions:
    """Read the embedding options of a request; missing fields have OpenAI's defaults.

    Args:
        widths: dimensions that the model offers, the full one first.

    Raises:
        RequestError: a field has a value that is not offered.
    """
    role = request.get("role", "document")
    if role not in ROLES:
        raise RequestError(f"role = {reprlib.repr(role)}; allowed: {', '.join(ROLES)}", "role")
    encoding_format = request.get("encoding_format", "float")
    if encoding_format not in FORMATS:
        raise RequestError(
            f"encoding_format = {reprlib.repr(encoding_format)}; allowed: {', '.join(FORMATS)}",
            "encoding_format",
        )
    dimensions = request.get("dimensions")
    if dimensions is not None:
        if isinstance(dimensions, bool) or dimensions not in widths:
            raise RequestError(
                f"dimensions = {reprlib.repr(dimensions)}; allowed for this model: {list(widths)}",
                "dimensions",
            )
        dimensions = int(dimensions)
    given = request.get("instruction")
    if given is not None and not (isinstance(given, str) and is_unicode(given)):
        raise RequestError(f"instruction = {reprlib.repr(given)} must be a text", "instruction")
    return EncodeOptions(
        "query" if role == "query" else "document", given, dimensions, encoding_format
    )


def read_texts(value: Any, field: str = "input") -> list[str]:
    """Read the texts in a request's field, which holds one text or a list.

    Raises:
        RequestError: none, an empty one, or token numbers.
    """
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, np.ndarray):
        texts = texts.tolist()
    if isinstance(texts, numbers.Number):
        texts = [texts]  # MLflow makes a table of a list of numbers, one in each row
    if not isinstance(texts, list | tuple) or not texts:
        raise RequestError(
            f"{field!r} must be a text or a list of texts, not empty: {reprlib.repr(value)}", field
        )
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(
                f"{field}[{i}] = {reprlib.repr(text)} must be a text; token ids are not accepted, "
                "since their tokenizer is unknown (LangChain's OpenAIEmbeddings sends ids of "
                "OpenAI's tokenizer: set check_embedding_ctx_length=False there)",
                field,
            )
        if not is_unicode(text):
            raise RequestError(
                f"{field}[{i}] has half of a surrogate pair (\\ud800 to \\udfff), which is "
                "not a valid Unicode character",
                field,
            )
        if not has_content(text):
            raise RequestError(
                f"{field}[{i}] is an empty text, which has no embedding: {reprlib.repr(text)} has "
                "no visible character",
                field,
            )
    return list(texts)


def cut(vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """Cut (N, D) vectors to their first components, renormalised: (N, dimensions) float32."""
    if dimensions is None or dimensions >= vectors.shape[1]:
        return vectors
    kept = vectors[:, :dimensions]
    return np.asarray(kept / np.linalg.norm(kept, axis=1, keepdims=True))


def encoded(vector: np.ndarray, encoding_format: str) -> list[float] | list[int] | str:
    """Encode a vector (D,) in the requested format.

    `float`: numbers. `base64`: OpenAI's, of little-endian float32. `int8`: the codes of
    `quantisation`, -127 to 127, one for each dimension. `uint8`: the same plus 128. `ubinary`: its
    packed bits as ⌈D/8⌉ numbers from 0 to 255, the first dimension in the highest bit of the first.
    `binary`: the same less 128, as Cohere and sentence-transformers have it.
    """
    match encoding_format:
        case "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        case "int8":
            stored = to_int8(vector)
        case "uint8":
            stored = to_int8(vector).astype(np.int16) + 128
        case "ubinary":
            stored = to_bits(vector)
        case "binary":
            stored = to_bits(vector).astype(np.int16) - 128
        case _:
            stored = vector
    found: list[float] | list[int] = stored.tolist()
    return found


def response(
    embeddings: Sequence[list[float] | list[int] | str], *, model: str, num_tokens: int
) -> dict[str, Any]:
    """Build the response to one request: encoded vectors in the order of its texts."""
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": embedding}
            for i, embedding in enumerate(embeddings)
        ],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
