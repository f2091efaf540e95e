"""Embedding servers over HTTP: the schemas of OpenAI, Text Embeddings Inference and Cohere."""

import base64
import ipaddress
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from rayembed.errors import ArtifactError, AssetError, ConfigError
from rayembed.proof.proof import ProofText
from rayembed_extras.verification.measure import Target, TextsRefusedError

_SECONDS = 120.0
"""Seconds without an answer until a request fails."""
_TRIES, _LONGEST_WAIT_SECONDS = 4, 10.0
_LATER = frozenset({429, 502, 503, 504})
_CHARACTERS_OF_PROBLEM = 300

_OWNERS = {
    "rayembed": "rayembed",
    "vllm": "vllm",
    "llamacpp": "llama.cpp",
    "me": "llama-cpp-python",
    "library": "ollama",
    "infinity": "infinity",
}
"""`owned_by` in a server's list of models → its software."""


_FIRST = ProofText("Paris", "document", "")
"""Text of the request by which a schema is tried."""


class _OtherSchemaError(ArtifactError):
    """The server has no such path, or another schema there."""


@dataclass(frozen=True)
class Schema:
    """Request and answer of one kind of server."""

    path: str
    body: Callable[[list[str], str | None, Mapping[str, Any]], dict[str, Any]]
    """Function from texts, the model's name and the fields of a role to a request."""
    vectors: Callable[[Any], list[Any]]
    """Function from an answer to its vectors; any error means another schema."""
    role: Callable[[ProofText], dict[str, Any]]
    """Fields that name a text's role, where the server puts prompts before texts."""
    width: str = "dimensions"
    """Field that asks for vectors of fewer numbers."""
    roles: bool = False
    """Whether servers of the schema put the prompt of the role before a text by default."""


def _openai_body(texts: list[str], model: str | None, more: Mapping[str, Any]) -> dict[str, Any]:
    return {"input": texts, **({"model": model} if model else {}), **more}


def _openai_vectors(answer: Any) -> list[Any]:
    rows = sorted(answer["data"], key=lambda row: row.get("index", 0))
    return [row["embedding"] for row in rows]


def _tei_body(texts: list[str], _: str | None, more: Mapping[str, Any]) -> dict[str, Any]:
    return {"inputs": texts, "truncate": True, **more}


def _cohere_body(texts: list[str], model: str | None, more: Mapping[str, Any]) -> dict[str, Any]:
    kind = {"embedding_types": ["float"], "truncate": "END"}
    return {"texts": texts, **({"model": model} if model else {}), **kind, **more}


def _cohere_vectors(answer: Any) -> list[Any]:
    found = answer["embeddings"]
    return list(found["float"] if isinstance(found, Mapping) else found)


SCHEMAS: Mapping[str, Schema] = {
    "openai": Schema("/v1/embeddings", _openai_body, _openai_vectors, lambda _: {}),
    "tei": Schema("/embed", _tei_body, list, lambda text: {"prompt_name": text.role}),
    "cohere": Schema(
        "/v2/embed",
        _cohere_body,
        _cohere_vectors,
        lambda text: {"input_type": f"search_{text.role}"},
        width="output_dimension",
        roles=True,
    ),
}
"""Schema by name, in the order in which an address is tried."""

_WITHOUT_VERSION = "/embeddings"
"""Path of OpenAI's schema where an address has no `/v1`; tried last."""


def open_server(
    url: str,
    *,
    schema: str | None = None,
    prompts: str | None = None,
    model: str | None = None,
    key: str | None = None,
    encoding: str = "float",
    dimensions: int | None = None,
) -> Target:
    """Find out how the server at an address embeds, by a request of one text.

    Args:
        url: with or without the path that embeds, as `http://host:8000` or `http://host/v1`.
        schema: a key of `SCHEMAS`; None: the path's, else the first one that answers.
        prompts: `client` sends prompts as literal text, `server` leaves them to the server; None:
            `server` for rayembed's own and Cohere's schema, else `client`.
        model: name in requests; None: that of the only model which the server lists.
        key: bearer token.
        encoding: `float` or `base64`, of OpenAI's schema.
        dimensions: that requests ask for; a server that refuses the field is asked without it.

    Raises:
        AssetError: the server is away, refuses the key, or has none of the schemas.
        ConfigError: it lists several models, and none is named.
    """
    root, stated, path = _split(url)
    server = _Server(root, key)
    listed = server.models()
    software = server.software(listed)
    asked = schema or stated or ("tei" if software == "tei" else None)
    if model is None and asked != "tei":
        model = _only(url, [str(one.get("id")) for one in listed])
    if software == "rayembed" and asked is None:
        asked = "openai"
    problems = []
    for name, call in _calls(server, asked, path, model, dimensions):
        if name == "openai":
            call.more["encoding_format"] = encoding
            if software == "vllm":
                call.more["truncate_prompt_tokens"] = -1
        try:
            call(["Paris"], _fields(name, software, prompts)(_FIRST))
        except (_OtherSchemaError, TextsRefusedError) as error:
            problems.append(f"{call.schema.path}: {error}")
            continue
        return _target(url, name, call, software, prompts)
    raise AssetError(
        f"no embedding server answers at {url!r}: {'; '.join(problems)}. Give the address that "
        "embeds, its --schema, or the name of its model (--model-name)"
    )


def _calls(
    server: "_Server",
    asked: str | None,
    path: str | None,
    model: str | None,
    dimensions: int | None,
) -> "Iterator[tuple[str, _Call]]":
    """Yield the ways to ask a server, by name of the schema, in the order in which they are
    tried.

    Args:
        asked: name of the schema; None: all.
        path: of the address; None: the usual ones.
    """
    ways = [(name, SCHEMAS[name]) for name in ([asked] if asked else SCHEMAS)]
    if asked in (None, "openai"):
        ways.append(("openai", replace(SCHEMAS["openai"], path=_WITHOUT_VERSION)))
    for name, schema in ways:
        if path is not None and path != schema.path:
            continue
        if dimensions is not None:
            yield name, _Call(server, schema, model, {schema.width: dimensions})
        yield name, _Call(server, schema, model, {})


def _target(
    url: str, name: str, call: "_Call", software: str | None, prompts: str | None
) -> Target:
    own, by_server = _is_own(name, software), _by_server(name, software, prompts)
    fields = _fields(name, software, prompts)

    def embed(texts: Sequence[ProofText]) -> np.ndarray:
        groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
        for i, text in enumerate(texts):
            more = fields(text)
            groups.setdefault(repr(more), (more, []))[1].append(i)
        found: dict[int, np.ndarray] = {}
        for more, places in groups.values():
            sent = [texts[i].text if by_server else texts[i].prompt + texts[i].text for i in places]
            found |= dict(zip(places, call(sent, more), strict=True))
        return np.stack([found[i] for i in range(len(texts))])

    if own and by_server:
        assumed = "the request names role and instruction, and the server puts the prompt"
    elif by_server:
        assumed = f"the server puts the prompt before a text ({name} schema)"
    else:
        assumed = (
            f"the client sends the prompt as part of the text ({name} schema); --prompts server if "
            "the server puts it there"
        )
    known = software or ("tei" if name == "tei" else None)
    return Target(url, embed, assumed, known, takes_instructions=own or not by_server)


def _is_own(name: str, software: str | None) -> bool:
    """Whether requests have rayembed's own fields, role and instruction."""
    return software == "rayembed" and name == "openai"


def _by_server(name: str, software: str | None, prompts: str | None) -> bool:
    """Whether the server puts the prompt before a text."""
    return (_is_own(name, software) or SCHEMAS[name].roles) if not prompts else prompts == "server"


def _fields(
    name: str, software: str | None, prompts: str | None
) -> Callable[[ProofText], dict[str, Any]]:
    """Function from a text to the fields of a request that name its role."""

    def own(text: ProofText) -> dict[str, Any]:
        told = {} if text.instruction is None else {"instruction": text.instruction}
        return {"role": text.role, **told}

    if not _by_server(name, software, prompts):
        return lambda _: {}
    return own if _is_own(name, software) else SCHEMAS[name].role


def _split(url: str) -> tuple[str, str | None, str | None]:
    """Address without the path that embeds, and schema and path of it; None without one."""
    root = url.rstrip("/")
    paths = {schema.path: name for name, schema in SCHEMAS.items()} | {_WITHOUT_VERSION: "openai"}
    for path in sorted(paths, key=len, reverse=True):
        if root.endswith(path):
            return root.removesuffix(path), paths[path], path
    for version in ("/v1", "/v2"):
        root = root.removesuffix(version)
    return root, None, None


def _only(url: str, names: Sequence[str]) -> str | None:
    """Name of the only model; None where the server lists none."""
    if len(names) > 1:
        raise ConfigError(
            f"the server at {url!r} has several models; choose one with --model-name: "
            f"{', '.join(names[:20])}"
        )
    return names[0] if names else None


class _Server:
    """Requests to one server."""

    def __init__(self, root: str, key: str | None) -> None:
        self.root = root
        # A proxy of the environment is not for this machine.
        self._client = httpx.Client(
            timeout=_SECONDS,
            trust_env=not is_loopback(root),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            follow_redirects=True,
        )

    def models(self) -> list[dict[str, Any]]:
        """Entries of the server's list of models; empty without a list."""
        for path in ("/v1/models", "/models"):
            found = self._read(path)
            rows = found.get("data") if isinstance(found, dict) else None
            if isinstance(rows, list):
                return [row for row in rows if isinstance(row, dict)]
        return []

    def software(self, models: Sequence[Mapping[str, Any]]) -> str | None:
        """Software behind the address, by what it says of itself; None: unknown."""
        owners = {str(one.get("owned_by", "")).lower() for one in models}
        known = {_OWNERS[owner] for owner in owners if owner in _OWNERS}
        if len(known) == 1:
            return known.pop()
        info = self._read("/info")
        is_tei = isinstance(info, dict) and {"model_id", "max_client_batch_size"} <= {*info}
        return "tei" if is_tei else None

    def _read(self, path: str) -> Any:
        """Request a path of the server and return its JSON; None if the server does not answer with
        JSON.
        """
        answer = self._send("GET", path, None)
        try:
            return answer.json() if answer.status_code == 200 else None
        except ValueError:
            return None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """JSON answer to a request.

        Raises:
            AssetError: no answer, no leave, or an error of the server.
            TextsRefusedError: the request is refused for what it holds.
            _OtherSchemaError: no such path, or no JSON.
        """
        answer = self._send("POST", path, body)
        status, said = answer.status_code, answer.text.strip()[:_CHARACTERS_OF_PROBLEM]
        if status in (404, 405, 501):
            raise _OtherSchemaError(f"HTTP {status}: {said}")
        if status in _LATER:
            raise AssetError(
                f"{self.root} answered with HTTP {status} in all {_TRIES} attempts: {said}"
            )
        if status != 200:
            raise TextsRefusedError(f"HTTP {status}: {said}")
        try:
            return answer.json()
        except ValueError:
            raise _OtherSchemaError(f"the answer is no JSON: {said}") from None

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        wait = 0.5
        for left in reversed(range(_TRIES)):
            try:
                answer = self._client.request(method, self.root + path, json=body)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise AssetError(
                    f"the server at {self.root!r} does not answer {method} {path}: "
                    f"{type(error).__name__}: {error}. Check that it is running and that the "
                    "address is right"
                ) from None
            if answer.status_code in (401, 403):
                raise AssetError(
                    f"the server at {self.root!r} refuses the key (HTTP {answer.status_code}); set "
                    "it in the environment variable that --api-key-env names"
                )
            if answer.status_code not in _LATER or not left:
                break
            time.sleep(min(max(wait, _seconds(answer)), _LONGEST_WAIT_SECONDS))
            wait *= 2
        return answer


@dataclass(frozen=True)
class _Call:
    """Vectors of texts by one schema of a server."""

    server: _Server
    schema: Schema
    model: str | None
    more: dict[str, Any]
    """Further fields of each request."""

    def __call__(self, texts: list[str], fields: Mapping[str, Any]) -> list[np.ndarray]:
        body = self.schema.body(texts, self.model, {**self.more, **fields})
        answer = self.server.post(self.schema.path, body)
        try:
            found = [_numbers(one) for one in self.schema.vectors(answer)]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise _OtherSchemaError(
                f"the answer does not have the expected schema: {error!r}"
            ) from None
        if len(found) != len(texts):
            raise ArtifactError(
                f"{self.server.root}{self.schema.path} gives {len(found)} vectors for "
                f"{len(texts)} texts; it must give one for each"
            )
        if len({len(one) for one in found}) > 1:
            raise ArtifactError(
                f"{self.server.root}{self.schema.path} gives vectors of several widths: "
                f"{sorted({len(one) for one in found})}"
            )
        return found


def _numbers(value: Any) -> np.ndarray:
    """(D,) numbers of a vector as a list, or in base64 as OpenAI's little-endian float32."""
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value, validate=True), dtype="<f4").astype(float)
    found = np.asarray(value, dtype=np.float64)
    if found.ndim == 2 and len(found):
        raise ArtifactError(
            f"the server gives {len(found)} vectors of {found.shape[1]} numbers for one text, one "
            "for each token: it pools none; name the model's pooling when it is started"
        )
    if found.ndim != 1 or not found.size:
        raise ValueError(
            f"a vector of the answer has the shape {found.shape}, but must be a list of numbers"
        )
    return found


def is_loopback(url: str) -> bool:
    """Whether an address is one of this machine's own."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _seconds(answer: httpx.Response) -> float:
    """Seconds of a `Retry-After` header; a date is ignored."""
    try:
        return max(float(answer.headers.get("Retry-After", 0)), 0.0)
    except ValueError:
        return 0.0
