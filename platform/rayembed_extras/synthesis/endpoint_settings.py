"""Settings of a language model's endpoint: address, name, key, and sampling."""

import re
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from rayembed.config.settings import Settings
from rayembed.config.types import Reference

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


class OpenAICompatible(Settings):
    """An endpoint with OpenAI's chat completions: vLLM, SGLang, Ray Serve, a provider's."""

    kind: Literal["http"] = "http"
    url: Reference = "http://127.0.0.1:8000/v1"
    """Base address; `/chat/completions` is appended. Not part of the request's identity: answers
    are reused when a server moves."""
    model: str = "mistralai/Mixtral-8x22B-Instruct-v0.1"
    """Model name at the endpoint (NV-Embed, section 4.3)."""
    revision: str = ""
    """Free text that distinguishes models of one name; a new value repeats all requests."""
    api_key_env: str | None = None
    """Environment variable that holds the key, never the key itself; None: no key."""
    concurrency: PositiveInt = 32
    """Maximum concurrent requests, over the whole cluster."""
    timeout_seconds: PositiveFloat = 300.0
    """Timeout of one request in seconds, until its answer is complete."""
    max_resends: int = Field(default=5, ge=0)
    """Maximum resends of a request after 408, 409, 425, 429, 5xx, a timeout or a lost connection.
    """
    first_wait_seconds: PositiveFloat = 1.0
    """Seconds before the first resend; doubled for each further one, unless `Retry-After` is given.
    """
    send_seed: bool = True
    """Whether requests have a `seed`, which some endpoints refuse."""
    limit_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Endpoint's name of the answer's token limit."""

    @property
    def completions_url(self) -> str:
        """Address of chat completions."""
        base, question, query = self.url.partition("?")
        return f"{base.rstrip('/')}/chat/completions{question}{query}"

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not re.match(r"https?://[^/?#]+", url):
            raise ValueError(
                "the address of an endpoint must begin with http:// or https://, followed by a host"
            )
        return url

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not _VARIABLE.fullmatch(name):
            # The value is not repeated: it may be a key.
            raise ValueError(
                "give the name of an environment variable in capitals, such as OPENAI_API_KEY; "
                "the key itself must not be in a setting because settings are written to disk"
            )
        return name


class AskedModel(Settings):
    """Settings of a language model behind an endpoint that answers questions about texts."""

    llm: OpenAICompatible = OpenAICompatible()
    """The endpoint."""
    temperature: float = Field(default=0.1, ge=0.0)
    """Sampling temperature."""
    max_tokens: PositiveInt = 512
    """Maximum tokens of an answer; models that think aloud need more."""
    max_words: PositiveInt = 300
    """Maximum words of a text in the prompt; longer texts are cut."""
    retries: int = Field(default=2, ge=0)
    """Maximum retries after an unusable answer, each with another seed."""
    max_failed_share: float = Field(default=0.05, ge=0.0, le=1.0)
    """Maximum share of texts without a usable answer; the job fails above it."""

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that affect the answers, apart from the prompt; the address does not."""
        values = self.model_dump(mode="json", include={"temperature", "max_tokens", "max_words"})
        return {**values, "retries": self.retries, "model": [self.llm.model, self.llm.revision]}
