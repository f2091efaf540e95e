"""Synthetic pairs: how many of which kind, which LLM writes them, what is accepted."""

import re
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from rayembed.config.credentials import refuse_credentials
from rayembed.config.data_run import DataPlacement
from rayembed.config.document import Document
from rayembed.config.settings import Settings

PairKind = Literal["short-long", "long-short", "short-short"]
"""Of query and positive: a short query and a document; a text and its label; two short texts."""

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


class OpenAICompatible(Settings):
    """An endpoint that speaks OpenAI's chat completions: vLLM, SGLang, Ray Serve, a provider's."""

    kind: Literal["http"] = "http"
    url: str = "http://127.0.0.1:8000/v1"
    """Base address; `/chat/completions` is appended. Where the model is served is not part of what
    was asked: answers are reused when a server moves."""
    model: str = "mistralai/Mixtral-8x22B-Instruct-v0.1"
    """As the endpoint names it (NV-Embed, section 4.3)."""
    revision: str = ""
    """Anything that tells two models of one name apart; another value asks everything anew."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key, never the key; None: no key."""
    concurrency: PositiveInt = 32
    """Requests in flight at the same time, over the whole cluster."""
    timeout_seconds: PositiveFloat = 300.0
    """Of one request, until its answer is complete."""
    max_resends: int = Field(default=5, ge=0)
    """How often a request is sent again after 408, 409, 425, 429, 5xx, a timeout or a lost
    connection."""
    first_wait_seconds: PositiveFloat = 1.0
    """Before the first resend; doubled for each further one, or what `Retry-After` says."""
    send_seed: bool = True
    """Whether requests have a `seed`, which some endpoints refuse."""
    limit_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the endpoint calls the limit of an answer's tokens."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not re.match(r"https?://[^/?#]+", url):
            raise ValueError(
                "the address of an endpoint begins with http:// or https:// and a host"
            )
        refuse_credentials(url)
        return url

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not _VARIABLE.fullmatch(name):
            # The value is not repeated: it may be a key.
            raise ValueError(
                "give the name of an environment variable in capitals, such as OPENAI_API_KEY; "
                "the key itself must stand in no setting, as settings are written to disk"
            )
        return name


class VLLM(Settings):
    """vLLM on the cluster's GPUs, started for the job. Each round of requests loads the model."""

    kind: Literal["vllm"] = "vllm"
    model: str = "hf://mistralai/Mixtral-8x22B-Instruct-v0.1@main"
    """Asset reference of a chat model."""
    replicas: PositiveInt = 1
    """Engines side by side."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share each layer; an engine has `tensor_parallel` × `pipeline_parallel`."""
    pipeline_parallel: PositiveInt = 1
    """Groups of GPUs that share the layers."""
    max_model_length: PositiveInt = 4096
    """Tokens of prompt and answer."""
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    """Of weights and computation; `auto`: the model's own."""
    quantization: str | None = None
    """vLLM's name of the weights' quantisation; None: what the model's folder says."""
    gpu_memory_share: float = Field(default=0.9, gt=0.0, le=1.0)
    """Of each GPU's memory, for weights and cache."""
    batch: PositiveInt = 64
    """Requests that are handed to an engine together; several batches are in it at once."""

    _no_credentials = field_validator("model")(refuse_credentials)


LLM = Annotated[OpenAICompatible | VLLM, Field(discriminator="kind")]


class SynthesisConfig(Settings):
    """Two steps (NV-Embed, section 4.3): the LLM thinks up tasks, then writes examples of each."""

    llm: LLM = OpenAICompatible()
    """Who writes."""
    examples: dict[PairKind, PositiveInt] = Field(
        default={"long-short": 40_000, "short-long": 40_000, "short-short": 40_000}, min_length=1
    )
    """Examples asked for of each kind; those that fail or repeat others are missing in the end."""
    examples_per_task: PositiveInt = 2
    """120,000 examples of 60,000 tasks in the paper."""
    tasks_per_request: PositiveInt = 40
    """Tasks that one answer of the first step should list."""
    task_rounds: PositiveInt = 8
    """How often more tasks are asked for because answers failed or repeated tasks."""
    topics: tuple[str, ...] = ()
    """Subjects that the requests for tasks name in turn, such as those of one's own documents;
    empty: the LLM chooses."""
    languages: dict[str, str] = Field(default={"en": "English"}, min_length=1)
    """Code of a language and what the prompt calls it; examples draw one, tasks are English."""
    temperature: PositiveFloat = 1.0
    """Of the LLM's sampling; 0 would give the same tasks again and again."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Probability mass that is sampled from."""
    max_tokens: PositiveInt = 3072
    """Of an answer. Three documents of 500 words are about 2,200 tokens of English."""
    retries: int = Field(default=3, ge=0)
    """How often an example is asked for again, with another seed, after an unusable answer."""
    min_words_share: float = Field(default=0.3, ge=0.0, le=1.0)
    """A document with less than this share of the words asked for is unusable; LLMs count badly."""
    max_failed_share: float = Field(default=0.05, ge=0.0, le=1.0)
    """The job fails when a larger share of the examples has no usable answer."""

    @field_validator("examples", "languages")
    @classmethod
    def _by_name(cls, values: dict[str, object]) -> dict[str, object]:
        """Sorted, because the order in which they are written decides nothing."""
        return dict(sorted(values.items()))

    @model_validator(mode="after")
    def _fits(self) -> "SynthesisConfig":
        if isinstance(self.llm, VLLM) and self.max_tokens >= self.llm.max_model_length:
            raise ValueError(
                f"max_tokens {self.max_tokens} leaves no room for a prompt in "
                f"llm.max_model_length {self.llm.max_model_length}; lower the one or raise the "
                "other"
            )
        return self


class SynthesisRun(Document):
    """What `jobs/synthesize_pairs.py` does."""

    name: str = Field(default="synthetic", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """Of the data set; its folder is named by it and by what it was made of."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of placeholders, languages, and the seeds that the LLM is sent."""
    synthesis: SynthesisConfig = SynthesisConfig()
    placement: DataPlacement = DataPlacement()
