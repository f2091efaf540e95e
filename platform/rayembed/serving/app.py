"""HTTP application: OpenAI's paths and error bodies, optional bearer tokens."""

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Awaitable, Collection
from dataclasses import fields
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from rayembed.serving.service import EmbeddingService, ServiceError

_RETRY_SECONDS = "2"

_logger = logging.getLogger(__name__)

_KINDS = {401: "authentication_error", 404: "invalid_request_error", 503: "server_error"}
"""OpenAI's error types by status; others are `invalid_request_error`."""


def make_app(service: EmbeddingService, *, key_digests: Collection[str] = ()) -> FastAPI:
    """ASGI application with `/v1/embeddings`, `/v1/models`, `/health` and `/metrics`.

    Args:
        key_digests: SHA-256 in hexadecimal of the tokens of which `/v1/…` asks for one; none: it
            asks for none. `/health` and `/metrics` never do.
    """
    app = FastAPI(title="rayembed", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(ServiceError)
    async def refused(_: Request, error: ServiceError) -> JSONResponse:
        return _error(error.status, str(error), error.field, error.code)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> JSONResponse:
        told = f"{request.method} {request.url.path}: {error.detail}"
        return _error(error.status_code, told, None, None)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        state = "ready" if service.healthy else "failing"
        return JSONResponse({"status": state}, status_code=200 if service.healthy else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(_metrics(service), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        _check_key(request, key_digests)
        return {"object": "list", "data": [service.describe()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        _check_key(request, key_digests)
        if name != service.name:
            raise ServiceError(
                404, f"there is no model {name!r} here", field="model", code="model_not_found"
            )
        return service.describe()

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        _check_key(request, key_digests)
        body = _object(await _read(request, service.limits.body_bytes))
        return await _answer(request, service.answer(body), service.limits.request_seconds)

    return app


async def _answer(request: Request, work: Awaitable[bytes], seconds: float) -> Response:
    """The answer, unless its client leaves before or it takes too long: then the work is cancelled.

    What fails is answered here: an error that reaches the web server closes the connection.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(request.receive())  # the body is read, so this is the end
    try:
        await asyncio.wait({task, left}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return Response(task.result(), media_type="application/json")
        if left.done():
            return Response(status_code=499)  # to nobody
        return _error(504, f"the request took longer than {seconds:g} seconds", None, None)
    except ServiceError:
        raise
    except Exception:
        _logger.exception("a request failed")
        return _error(500, "the server failed; its log has the reason", None, None)
    finally:
        task.cancel()
        left.cancel()


def _metrics(service: EmbeddingService) -> str:
    """Counters in Prometheus' text format, all of the one model."""
    label = service.name.replace("\\", "\\\\").replace('"', '\\"')
    values = [
        (f"rayembed_{field.name}_total", "counter", getattr(service.counts, field.name))
        for field in fields(service.counts)
    ]
    values.append(("rayembed_waiting_texts", "gauge", service.waiting_texts))
    return "".join(
        f'# TYPE {name} {kind}\n{name}{{model="{label}"}} {value}\n' for name, kind, value in values
    )


def digest(key: str) -> str:
    """SHA-256 of a token in hexadecimal, so that the token itself is not passed on."""
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
            "this server asks for a token: send the header 'Authorization: Bearer <token>'",
            code="invalid_api_key",
        )


async def _read(request: Request, largest: int) -> bytes:
    """Request body; reading stops once it is too large."""
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > largest:
            raise ServiceError(413, f"the request is larger than {largest} bytes")
    return bytes(found)


def _object(body: bytes) -> dict[str, Any]:
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
    told = {"message": message, "type": kind, "param": field, "code": code}
    headers = {"Retry-After": _RETRY_SECONDS} if status == 503 else None
    return JSONResponse({"error": told}, status_code=status, headers=headers)
