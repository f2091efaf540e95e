"""Settings of synthetic pairs: numbers, kinds, the LLM that writes them, and which answers are
usable.
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rayembed.config.data_run import DataPlacement
from rayembed.config.document import Document
from rayembed.config.settings import Settings
from rayembed.config.types import PlainName, Reference, Seed, SortedDict
from rayembed_extras.synthesis.endpoint_settings import OpenAICompatible

PairKind = Literal["short-long", "long-short", "short-short"]
"""Kind of query and positive: a short query and a document; a text and its label; two short texts.
"""


class VLLM(Settings):
    """Settings of vLLM on the cluster's GPUs, started for the job. Each round of requests loads the
    model.
    """

    kind: Literal["vllm"] = "vllm"
    model: Reference = "hf://mistralai/Mixtral-8x22B-Instruct-v0.1@main"
    """Asset reference of a chat model."""
    replicas: PositiveInt = 1
    """Number of parallel engines."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share each layer; an engine has `tensor_parallel` × `pipeline_parallel`."""
    pipeline_parallel: PositiveInt = 1
    """Groups of GPUs that share the layers."""
    max_model_length: PositiveInt = 4096
    """Maximum tokens of prompt and answer."""
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    """Number type of weights and computation; `auto`: the model's own."""
    quantization: str | None = None
    """vLLM's name of the weights' quantisation; None: as in the model's folder."""
    gpu_memory_share: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of each GPU's memory for weights and cache."""
    batch: PositiveInt = 64
    """Requests in one batch for an engine, which processes several batches concurrently."""


LLM = Annotated[OpenAICompatible | VLLM, Field(discriminator="kind")]


class SynthesisConfig(Settings):
    """Settings of two-step synthesis (NV-Embed, section 4.3): an LLM proposes tasks, then writes
    examples of each.
    """

    llm: LLM = OpenAICompatible()
    """Endpoint or engine of the LLM."""
    examples: SortedDict[PairKind, PositiveInt] = Field(
        default={"long-short": 40_000, "short-long": 40_000, "short-short": 40_000}, min_length=1
    )
    """Requested examples of each kind; failed and duplicate ones are not replaced."""
    examples_per_task: PositiveInt = 2
    """Examples of each task; 120,000 examples of 60,000 tasks in the paper."""
    tasks_per_request: PositiveInt = 40
    """Number of tasks requested in one answer of the first step."""
    task_rounds: PositiveInt = 8
    """Maximum rounds of task requests, repeated when answers failed or repeated tasks."""
    topics: tuple[str, ...] = ()
    """Subjects for the task requests in turn, such as subjects of the user's documents; empty: the
    LLM chooses."""
    languages: SortedDict[str, str] = Field(default={"en": "English"}, min_length=1)
    """Language code → its name in prompts; each example draws one, tasks are in English."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of the LLM; 0 would repeat the same tasks."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Probability mass for nucleus sampling."""
    max_tokens: PositiveInt = 3072
    """Maximum tokens of an answer. Three documents of 500 words are about 2,200 tokens of English.
    """
    retries: int = Field(default=3, ge=0)
    """Maximum retries of an example after an unusable answer, each with another seed."""
    min_words_share: float = Field(default=0.3, ge=0.0, le=1.0)
    """Minimum share of the requested words in a usable document; LLMs count badly."""
    max_failed_share: float = Field(default=0.05, ge=0.0, le=1.0)
    """Maximum share of examples without usable answer; the job fails above it."""

    @model_validator(mode="after")
    def _fits(self) -> "SynthesisConfig":
        if isinstance(self.llm, VLLM) and self.max_tokens >= self.llm.max_model_length:
            raise ValueError(
                f"max_tokens {self.max_tokens} leaves no room for a prompt in "
                f"llm.max_model_length {self.llm.max_model_length}; lower max_tokens or raise "
                "llm.max_model_length"
            )
        return self


class SynthesisRun(Document):
    """Settings of `rayembed synthesize`."""

    name: PlainName = "synthetic"
    """Name of the data set; its folder's name also has a fingerprint of its inputs."""
    seed: Seed = 0
    """Seed of placeholders, languages, and of the LLM's sampling seeds."""
    synthesis: SynthesisConfig = SynthesisConfig()
    placement: DataPlacement = DataPlacement()
