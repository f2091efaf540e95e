"""HTTP application: OpenAI's paths and error bodies, optional bearer token."""

import hashlib
import hmac
import json
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rayembed.serving.service import EmbeddingService, ServiceError

_RETRY_SECONDS = "2"

_KINDS = {401: "authentication_error", 404: "invalid_request_error", 503: "server_error"}
"""OpenAI's error types by status; others are `invalid_request_error`."""


def make_app(service: EmbeddingService, *, key_digest: str | None = None) -> FastAPI:
    """ASGI application with `/v1/embeddings`, `/v1/models` and `/health`.

    Args:
        key_digest: SHA-256 in hexadecimal of the token that `/v1/…` asks for; None: it asks for
            none. `/health` never does.
    """
    app = FastAPI(title="rayembed", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(ServiceError)
    async def refused(_: Request, error: ServiceError) -> JSONResponse:
        return _error(error.status, str(error), error.field, error.code)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> JSONResponse:
        told = f"{request.method} {request.url.path}: {error.detail}"
        return _error(error.status_code, told, None, None)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return _error(500, f"the server failed: {error}", None, None)

    @app.get("/health")
    async def health() -> JSONResponse:
        told: dict[str, Any] = {
            "status": service.state,
            "model": service.name,
            "source": service.source,
            "counts": asdict(service.counts),
        }
        if service.failure:
            told["failure"] = service.failure
        return JSONResponse(told, status_code=200 if service.state == "ready" else 503)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        _check_key(request, key_digest)
        return {"object": "list", "data": [service.describe()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        _check_key(request, key_digest)
        if name != service.name:
            raise ServiceError(
                404, f"there is no model {name!r} here", field="model", code="model_not_found"
            )
        return service.describe()

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> JSONResponse:
        _check_key(request, key_digest)
        body = _object(await _read(request, service.limits.body_bytes))
        return JSONResponse(await service.answer(body))

    return app


def digest(key: str) -> str:
    """SHA-256 of a token in hexadecimal, so that the token itself is not passed on."""
    return hashlib.sha256(key.encode()).hexdigest()


def _check_key(request: Request, wanted: str | None) -> None:
    if wanted is None:
        return
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(digest(key.strip()), wanted):
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
    if not isinstance(value, dict):
        raise ServiceError(400, f"the body must be a JSON object, found {type(value).__name__}")
    return value


def _error(status: int, message: str, field: str | None, code: str | None) -> JSONResponse:
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    told = {"message": message, "type": kind, "param": field, "code": code}
    headers = {"Retry-After": _RETRY_SECONDS} if status == 503 else None
    return JSONResponse({"error": told}, status_code=status, headers=headers)
