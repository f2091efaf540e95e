"""vLLM through `ray.data.llm`, as far as it goes without a GPU."""

from pathlib import Path

import pytest
from ray.data.llm import build_processor
from tiny_models import save_decoder

from rayembed.errors import PlacementError
from rayembed_extras.synthesis.on_ray import (
    fetch_llm,
    vllm_answer,
    vllm_processor_config,
)
from rayembed_extras.synthesis.settings import VLLM

pytestmark = pytest.mark.ray


def test_settings_of_the_vllm_processor() -> None:
    engine = VLLM(replicas=2, tensor_parallel=4, pipeline_parallel=2, quantization="fp8", batch=16)
    made = vllm_processor_config(engine, "/models/writer")
    assert made.model_source == "/models/writer"
    assert made.concurrency == (2, 2)
    assert made.batch_size == 16
    assert made.should_continue_on_error
    assert (
        made.engine_kwargs.items()
        >= {
            "tensor_parallel_size": 4,
            "pipeline_parallel_size": 2,
            "max_model_len": 4096,
            "dtype": "auto",
            "gpu_memory_utilization": 0.9,
            "quantization": "fp8",
        }.items()
    )
    assert "quantization" not in vllm_processor_config(VLLM(), "/models/writer").engine_kwargs


def test_rows_of_the_vllm_processor() -> None:
    names = {"id": "i", "group": "g", "key": "k"}
    written = names | {"generated_text": "text", "num_input_tokens": 5, "num_generated_tokens": 9}
    good = vllm_answer(written | {"__inference_error__": ""}, 10)
    assert (good.outcome, good.text, good.cut_off) == ("answered", "text", False)
    assert (good.prompt_tokens, good.answer_tokens) == (5, 9)
    assert vllm_answer(written, 9).cut_off
    long = vllm_answer(names | {"__inference_error__": "ValueError: prompt too long"}, 10)
    assert (long.outcome, long.text) == ("refused", "")
    died = vllm_answer(names | {"__inference_error__": "RuntimeError: CUDA"}, 10)
    assert (died.outcome, died.problem) == ("lost", "RuntimeError: CUDA")


def test_the_vllm_processor_is_built_of_a_model_folder(cluster: None, tmp_path: Path) -> None:
    """As far as it goes without vLLM: Ray's own stages, around an engine that is not started."""
    save_decoder(tmp_path / "writer")
    made = vllm_processor_config(VLLM(replicas=2, tensor_parallel=2), str(tmp_path / "writer"))
    processor = build_processor(made, preprocess=dict, postprocess=dict)
    assert processor.list_stage_names() == [
        "ChatTemplateStage",
        "TokenizeStage",
        "vLLMEngineStage",
        "DetokenizeStage",
    ]
    engine = processor.get_stage_by_name("vLLMEngineStage")
    assert engine.fn_constructor_kwargs["model"] == str(tmp_path / "writer")
    assert engine.fn_constructor_kwargs["engine_kwargs"]["distributed_executor_backend"] == "ray"
    compute = engine.map_batches_kwargs["compute"]
    assert (compute.min_size, compute.max_size) == (2, 2)


def test_vllm_without_a_gpu_is_refused(cluster: None) -> None:
    with pytest.raises(PlacementError, match="needs a GPU"):
        fetch_llm("hf://owner/model@main")
