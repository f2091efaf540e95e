"""Run vLLM on the cluster's GPUs, with requests sent through `ray.data.llm`.

`synthesize` defines requests and the use of answers; this module only sends requests.
"""

import importlib.util
import logging
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.data
from ray.data.llm import (
    ProcessorConfig,
    build_processor,
    vLLMEngineProcessorConfig,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayembed.assets.resolver import resolve_model
from rayembed.errors import ConfigError, PlacementError, RayembedError
from rayembed.models.loading.files import weights_fingerprint
from rayembed_extras.synthesis.requests import Ask, ChatAnswer, Request
from rayembed_extras.synthesis.settings import VLLM, SynthesisConfig

_BLOCK_BYTES = 64 << 10
"""Block size in bytes; a kill loses answers of unfinished blocks."""

_BATCHES_AT_ONCE = 4
"""Batches of one task that Ray Data runs concurrently in an asynchronous actor."""

_COMMIT = re.compile(r"hf://.+@[0-9a-f]{40}")


def ask_vllm(config: SynthesisConfig, engine: VLLM, path: str) -> Ask:
    """Create a function that starts vLLM engines on the cluster's GPUs, sends them requests, and
    stops them.

    Args:
        config: has the sampling.
        engine: settings of the engines.
        path: the model's folder, the same on all nodes.
    """
    made = vllm_processor_config(engine, path)
    sampling = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_tokens": config.max_tokens,
    }

    def as_messages(row: dict[str, Any]) -> dict[str, Any]:
        request: Request = pickle.loads(row["request"])
        return {
            "messages": [{"role": "user", "content": request.prompt}],
            "sampling_params": sampling | {"seed": request.sampling_seed},
            **{name: getattr(request, name) for name in _NAMES},
        }

    def as_answer(row: dict[str, Any]) -> dict[str, Any]:
        kept = (*_NAMES, "generated_text", "num_input_tokens", "num_generated_tokens")
        return {name: row[name] for name in kept}

    def ask(requests: Sequence[Request]) -> Iterator[ChatAnswer]:
        processor = build_processor(made, preprocess=as_messages, postprocess=as_answer)
        rows_per_task = engine.batch * _BATCHES_AT_ONCE
        for row in processor(_dataset(requests, rows_per_task)).iter_rows():
            yield vllm_answer(row, config.max_tokens)

    return ask


def vllm_answer(row: Mapping[str, Any], max_tokens: int) -> ChatAnswer:
    """Convert a row of the vLLM processor into an answer or its failure."""
    names = {name: row[name] for name in _NAMES}
    problem = str(row.get("__inference_error__") or "")
    if problem:
        # A prompt that the engine does not take: it would not take it the next time.
        refused = problem.startswith("ValueError")
        return ChatAnswer(**names, outcome="refused" if refused else "lost", problem=problem[:300])
    answer_tokens = int(row["num_generated_tokens"])
    return ChatAnswer(
        **names,
        outcome="answered",
        text=str(row["generated_text"]).encode("utf-8", "replace").decode(),
        cut_off=answer_tokens >= max_tokens,
        prompt_tokens=int(row["num_input_tokens"]),
        answer_tokens=answer_tokens,
    )


def vllm_processor_config(engine: VLLM, path: str) -> ProcessorConfig:
    """Build Ray's settings for engines of the model at `path`."""
    settings: dict[str, Any] = {
        "tensor_parallel_size": engine.tensor_parallel,
        "pipeline_parallel_size": engine.pipeline_parallel,
        "max_model_len": engine.max_model_length,
        "dtype": engine.dtype,
        "gpu_memory_utilization": engine.gpu_memory_share,
        "enable_prefix_caching": True,  # prompts of a kind begin alike
    }
    if engine.quantization is not None:
        settings["quantization"] = engine.quantization
    return vLLMEngineProcessorConfig(
        model_source=path,
        engine_kwargs=settings,
        # A fixed pool: a range would start with one engine and load the model late in the others.
        concurrency=(engine.replicas, engine.replicas),
        batch_size=engine.batch,
        should_continue_on_error=True,
        log_engine_metrics=False,  # they need a port that not every cluster opens
    )


def fetch_llm(reference: str) -> tuple[str, str]:
    """Download the model to all GPU nodes; return its folder and the fingerprint of its
    weights.

    Raises:
        AssetError: a node cannot have it.
        ConfigError: a node has no vLLM.
        PlacementError: no node has a GPU, or the folder has another name on each.
    """
    nodes = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("GPU")]
    if not nodes:
        raise PlacementError(
            "synthesis.llm.kind='vllm' needs a GPU, but no node of the cluster has a GPU; serve "
            "the model elsewhere and set synthesis.llm.kind=http"
        )
    pinned = _COMMIT.fullmatch(reference) is not None
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    remote = ray.remote(num_cpus=0, max_retries=1)(_fetch_here)
    tasks = [
        # Reading hundreds of gigabytes for their fingerprint takes minutes: once, if at all.
        remote.options(scheduling_strategy=place).remote(reference, i == 0 and not pinned)
        for i, place in enumerate(places)
    ]
    found = ray.get(tasks)
    for item in found:
        if isinstance(item, RayembedError):
            raise item
    paths = sorted({path for path, _ in found})
    if len(paths) > 1:
        raise PlacementError(
            f"the model {reference!r} is at {paths[0]!r} on one node and at {paths[1]!r} on "
            "another; give all nodes the same RAYEMBED_CACHE and HF_HOME, or a shared folder"
        )
    return paths[0], reference if pinned else str(found[0][1])


def _fetch_here(reference: str, weigh: bool) -> tuple[str, str] | RayembedError:
    """Download the model on this node; return an error as a value, because Ray would change the
    class of a raised one.
    """
    if importlib.util.find_spec("vllm") is None:
        return ConfigError(
            "synthesis.llm.kind='vllm' needs vLLM, which the nodes with GPUs do not have; put it "
            "into their image (pip install vllm, in a version that fits the installed Ray and "
            "torch), or take synthesis.llm.kind=http"
        )
    try:
        path = resolve_model(reference)
        return str(path), weights_fingerprint(Path(path)) if weigh else ""
    except RayembedError as error:
        return error


_NAMES = ("id", "group", "key")


def _dataset(requests: Sequence[Request], rows_per_task: int) -> Any:
    """Make a Ray data set with a small row for each request; prompts are built only when sent."""
    rows = [{"request": pickle.dumps(request)} for request in requests]
    dataset = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // rows_per_task))
    context = dataset.context
    context.print_on_execution_start = False
    context.enable_progress_bars = False
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
    context.target_max_block_size = _BLOCK_BYTES
    # Answers come as they are ready: an order would hold all back behind the slowest.
    context.execution_options.preserve_order = False
    return dataset
