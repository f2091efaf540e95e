"""HTTP application: paths, OpenAI's error bodies, optional bearer tokens."""

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Awaitable, Collection, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rayembed.registry.openai_schema import ROLES
from rayembed_extras.serving.routes import ROUTES
from rayembed_extras.serving.service import Answer, Served, ServiceError, State
from rayembed_extras.serving.settings import Limits

_RETRY_SECONDS = "2"
_STATE_SECONDS = 5.0
"""Seconds after which a model that does not report its state counts as failing."""

_logger = logging.getLogger(__name__)

_KINDS = {401: "authentication_error", 404: "invalid_request_error", 503: "server_error"}
"""OpenAI's error types by status; others are `invalid_request_error`."""


def make_app(
    services: Mapping[str, Served], limits: Limits, *, key_digests: Collection[str] = ()
) -> FastAPI:
    """Create the ASGI application with the paths of `ROUTES`, `/v1/models`, `/health` and
    `/metrics`.

    Args:
        services: name → model.
        key_digests: SHA-256 in hexadecimal of the tokens of which requests must have one; none:
            they need none. `/health` and `/metrics` never do.
    """
    app = FastAPI(title="rayembed", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(ServiceError)
    async def refused(_: Request, error: ServiceError) -> JSONResponse:
        return _error(error.status, str(error), error.field, error.code)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> JSONResponse:
        details = f"{request.method} {request.url.path}: {error.detail}"
        return _error(error.status_code, details, None, None)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        states = await _states(services)
        failing = [name for name in services if name not in states or not states[name].healthy]
        if failing:
            return JSONResponse({"status": "failing", "models": failing}, status_code=503)
        differing = {name: state.differs for name, state in states.items() if state.differs}
        if differing:
            return JSONResponse({"status": "other vectors", "models": differing}, status_code=503)
        return JSONResponse({"status": "ready"})

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics() -> PlainTextResponse:
        text = _metrics(await _states(services))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @app.api_route("/v1/models", methods=["GET", "HEAD"])
    async def models(request: Request) -> dict[str, Any]:
        _check_key(request, key_digests)
        entries = await asyncio.gather(*(one.describe() for one in services.values()))
        return {"object": "list", "data": entries}

    @app.api_route("/v1/models/{name:path}", methods=["GET", "HEAD"])
    async def model(name: str, request: Request) -> dict[str, Any]:
        _check_key(request, key_digests)
        return await services[_bare_name(name, services)].describe()

    bodies = _Bodies(limits)

    async def embed(request: Request) -> Response:
        _check_key(request, key_digests)
        ends = asyncio.get_running_loop().time() + limits.request_seconds
        body = await bodies.read(request, ends)
        if "model" in request.query_params:  # of clients that can set nothing but an address
            body.setdefault("model", request.query_params["model"])
        service = services[_bare_name(body.get("model"), services)]
        work = service.answer(request.url.path, body)
        return await _answer(request, work, ends, limits.request_seconds)

    for path in ROUTES:
        app.post(path)(embed)
    return app


async def _answer(
    request: Request, work: Awaitable[Answer], ends: float, seconds: float
) -> Response:
    """Return the answer to a request; cancel the work if the client disconnects or the time limit
    passes.

    What fails is answered here: an error that reaches the web server closes the connection.

    Args:
        ends: time of the loop at which the request has taken too long, which is after `seconds`.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(request.receive())  # the body is read, so this is the end
    rest = max(0.0, ends - asyncio.get_running_loop().time())
    try:
        await asyncio.wait({task, left}, timeout=rest, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            answer = task.result()
            details = {"X-Truncated-Texts": str(answer.truncated)}
            if answer.belongs_to:
                details["X-Index"] = answer.belongs_to
            return Response(answer.content, headers=details, media_type="application/json")
        if left.done():
            return Response(status_code=499)  # to nobody
        return _error(504, f"the request took longer than {seconds:g} seconds", None, None)
    except ServiceError:
        raise
    except Exception:
        _logger.exception("request failed with an unexpected error")
        return _error(500, "the server failed; its log has the reason", None, None)
    finally:
        task.cancel()
        left.cancel()


async def _states(services: Mapping[str, Served]) -> dict[str, State]:
    """Collect the state of each model that replies within the time limit."""

    async def one(service: Served) -> State | None:
        try:
            return await asyncio.wait_for(service.state(), _STATE_SECONDS)
        except Exception:  # noqa: BLE001 - a model that fails has no state
            return None

    found = await asyncio.gather(*map(one, services.values()))
    return {name: state for name, state in zip(services, found, strict=True) if state}


def _metrics(states: Mapping[str, State]) -> str:
    """Format counters and gauges of all models in Prometheus' text format."""
    values: dict[tuple[str, str], list[str]] = {}
    for name, state in states.items():
        label = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        gauges: dict[str, float] = {"waiting_texts": state.waiting_texts}
        if state.proof_cosine is not None:
            gauges["proof_cosine"] = state.proof_cosine
        if state.proof_cosine is not None or state.differs:
            gauges["proof_same"] = 0 if state.differs else 1
        metrics: dict[tuple[str, str], float] = {
            **{(f"{key}_total", "counter"): number for key, number in state.totals.items()},
            **{(key, "gauge"): number for key, number in gauges.items()},
        }
        for (key, kind), number in metrics.items():
            line = f'{{model="{label}"}} {number}'
            values.setdefault((f"rayembed_{key}", kind), []).append(line)
    return "".join(
        f"# TYPE {metric} {kind}\n" + "".join(f"{metric}{one}\n" for one in lines)
        for (metric, kind), lines in values.items()
    )


def _bare_name(asked: Any, services: Collection[str]) -> str:
    """Return the model's name in a request, without the role appended to it."""
    if asked is None and len(services) == 1:
        return next(iter(services))
    names = ", ".join(map(repr, services))
    if asked is None:
        raise ServiceError(400, f"'model' must be one of {names}", field="model")
    name, _, role = asked.partition(":") if isinstance(asked, str) else ("", "", "")
    if name not in services or role not in ("", *ROLES):
        raise ServiceError(
            404,
            f"there is no model {str(asked)[:80]!r} here; this server has {names}, each also with "
            "':query' or ':document' behind it",
            field="model",
            code="model_not_found",
        )
    return name


def digest(key: str) -> str:
    """Return the SHA-256 of a token in hexadecimal, so that the token itself is not passed on."""
    return hashlib.sha256(key.encode()).hexdigest()


def _check_key(request: Request, wanted: Collection[str]) -> None:
    if not wanted:
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    found = digest(key.strip())
    matches = [hmac.compare_digest(found, one) for one in wanted]
    if scheme.lower() != "bearer" or not any(matches):
        raise ServiceError(
            401,
            "this server needs a token: send the header 'Authorization: Bearer <token>'",
            code="invalid_api_key",
        )


class _Bodies:
    """Reads request bodies within the limits of size, time and total bytes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: dict[asyncio.Timeout, int] = {}
        """Bytes of each body that is being read, by the time that it has."""
        self._bytes = 0

    async def read(self, request: Request, ends: float) -> dict[str, Any]:
        """Read the JSON object in a request's body.

        Args:
            ends: time of the loop until which it must be there, unless it has less time by itself.

        Raises:
            ServiceError: too large (413), too slow (408), no room for it (503), no object (400).
        """
        limits = self._limits
        ends = min(ends, asyncio.get_running_loop().time() + limits.body_seconds)
        time = asyncio.timeout_at(ends)
        try:
            async with time:
                return _object(await self._read(request, time))
        except TimeoutError:
            if time.when() != ends:
                raise self._no_room() from None
            seconds = min(limits.body_seconds, limits.request_seconds)
            raise ServiceError(
                408, f"the request was not sent within {seconds:g} seconds"
            ) from None
        except ClientDisconnect:
            raise ServiceError(499, "the client disconnected") from None  # to nobody
        finally:
            self._bytes -= self._held.pop(time, 0)

    async def _read(self, request: Request, time: asyncio.Timeout) -> bytearray:
        """Read a request body; raise if it is too large, or if all bodies together are too large
        and it is the largest.

        Another one that is the largest is ended by its time.
        """
        found, largest = bytearray(), self._limits.body_bytes
        async for part in request.stream():
            found += part
            if len(found) > largest:
                raise ServiceError(413, f"the request is larger than {largest} bytes")
            self._held[time] = self._held.get(time, 0) + len(part)
            self._bytes += len(part)
            while self._bytes > self._limits.waiting_bytes:
                most = max(self._held, key=self._held.__getitem__)
                self._bytes -= self._held.pop(most)
                if most is time:
                    raise self._no_room()
                if not most.expired():
                    most.reschedule(asyncio.get_running_loop().time())
        return found

    def _no_room(self) -> ServiceError:
        return ServiceError(
            503,
            f"requests that are being sent hold more than {self._limits.waiting_bytes} bytes, and "
            "this one most of them; try again later, or send fewer texts at once",
        )


def _object(body: bytearray) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise ServiceError(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise ServiceError(400, "the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise ServiceError(400, f"the body must be a JSON object, found {type(value).__name__}")
    return value


def _error(status: int, message: str, field: str | None, code: str | None) -> JSONResponse:
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    details = {"message": message, "type": kind, "param": field, "code": code}
    headers = {"Retry-After": _RETRY_SECONDS} if status == 503 else None
    return JSONResponse({"error": details}, status_code=status, headers=headers)
