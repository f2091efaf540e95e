"""Synthesis through `ray.data.llm`: an endpoint with faults gives what a plain loop gives."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from chat_server import Reply, chat_server
from fake_llm import FakeLLM
from ray.data.llm import build_processor
from tiny_models import save_decoder

from rayembed.config.document import fingerprint
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import DatasetArtifact
from rayembed.data.engine.parts import read_records
from rayembed.errors import AssetError, ConfigError, PlacementError
from rayembed_extras.synthesis.chat_endpoint import read_key
from rayembed_extras.synthesis.endpoint_settings import OpenAICompatible
from rayembed_extras.synthesis.on_ray import (
    fetch_llm,
    http_processor_config,
    synthesize,
    vllm_answer,
    vllm_processor_config,
)
from rayembed_extras.synthesis.settings import VLLM, SynthesisRun
from rayembed_extras.synthesis.synthesize import make_synthetic

pytestmark = pytest.mark.ray

BROKEN = 0.2
IDENTITY = fingerprint(["writer", ""])
EXAMPLES = {"short-long": 40, "long-short": 30, "short-short": 30}


def make_run(
    storage: Path, url: str, examples: Mapping[str, int] = EXAMPLES, **llm: Any
) -> SynthesisRun:
    quick = {"first_wait_seconds": 0.01, "concurrency": 6, "max_resends": 2}
    return parse(
        SynthesisRun,
        {
            "name": "made",
            "synthesis": {
                "examples": examples,
                "tasks_per_request": 5,
                "max_failed_share": 0.2,
                "retries": 1,
                "llm": {"kind": "http", "url": url, "model": "writer", **quick, **llm},
            },
            "placement": {"storage_path": str(storage)},
        },
    )


def records_of(prepared: DatasetArtifact) -> list[Any]:
    return [record for part in prepared.parts for record in read_records(part.path)]


def faulty(body: dict[str, Any], before: int) -> Reply | None:
    """Every fifth request fails once, in one of the ways of real servers."""
    if before or body["seed"] % 5:
        return None
    faults = (
        Reply(500, "out of memory"),
        Reply(429, '{"error": "slow down"}', {"Retry-After": "0"}),
        Reply(200, "<html>bad gateway</html>"),
    )
    return faults[body["seed"] // 5 % 3]


def test_an_endpoint_with_faults_gives_what_a_plain_loop_gives(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRITER_KEY", "secret")
    with chat_server(reply=faulty, broken_share=BROKEN) as server:
        run = make_run(tmp_path / "ray", server.url, api_key_env="WRITER_KEY")
        prepared = synthesize(run)
        asked = server.asked.copy()
        assert synthesize(run).reused
        assert server.asked == asked
    assert set(server.answered.values()) <= {1, 2}  # 2: the page of a gateway had status 200
    assert max(asked.values()) == 2
    assert server.most_in_flight <= 6
    assert server.most_in_flight > 1
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and b"secret" in p.read_bytes()]
    llm = FakeLLM(broken_share=BROKEN)
    plain = make_synthetic(make_run(tmp_path / "plain", server.url), IDENTITY, llm)
    assert prepared.fingerprint == plain.fingerprint
    assert records_of(prepared) == records_of(plain)
    assert len(records_of(prepared)) > 90
    assert prepared.manifest["failed_tries"] == plain.manifest["failed_tries"] != {}
    assert len(asked) == llm.asked.total()
    assert prepared.manifest["tokens"]["prompt"] > 0


def test_a_killed_actor_changes_nothing(cluster: None, tmp_path: Path) -> None:
    killed: list[str] = []

    def kills_once(body: dict[str, Any], before: int) -> None:
        with server.lock:  # several threads come by here
            if server.asked.total() < 25 or killed:
                return
            below = {process.pid for process in psutil.Process().children(recursive=True)}
            # `process_iter` leaves out those that end while it looks.
            for process in psutil.process_iter(["cmdline"]):
                title = " ".join(process.info["cmdline"] or [])
                if process.pid in below and "HttpRequestUDF" in title:
                    killed.append(title)
                    process.kill()

    examples = {"short-short": 60}
    with chat_server() as server:
        server.reply = kills_once
        run = make_run(tmp_path / "ray", server.url, examples=examples)
        prepared = synthesize(run)
    assert len(killed) == 1
    assert server.asked.total() > len(server.asked), "what was in flight is asked for again"
    plain = make_synthetic(
        make_run(tmp_path / "plain", server.url, examples=examples), IDENTITY, FakeLLM()
    )
    assert records_of(prepared) == records_of(plain)


def test_an_endpoint_that_refuses_all_ends_the_job_with_its_words(
    cluster: None, tmp_path: Path
) -> None:
    refuses = chat_server(reply=lambda body, before: Reply(401, "no such key"))
    with refuses as server, pytest.raises(AssetError, match="HTTP 401: no such key"):
        synthesize(make_run(tmp_path, server.url))
    assert server.asked.total() < 30


def test_a_missing_key_is_told_before_anything_is_asked(monkeypatch) -> None:
    monkeypatch.delenv("WRITER_KEY", raising=False)
    with pytest.raises(ConfigError, match="WRITER_KEY, which is not set"):
        read_key(OpenAICompatible(api_key_env="WRITER_KEY"), "synthesis.llm")
    assert read_key(OpenAICompatible(), "synthesis.llm") is None


def test_settings_of_the_http_processor() -> None:
    made = http_processor_config(OpenAICompatible(url="http://host/v1", concurrency=100), "secret")
    assert made.url == "http://host/v1/chat/completions"
    assert (made.batch_size, made.concurrency, made.max_retries) == (50, 1, 0)
    assert made.headers is None
    assert "secret" not in repr(made)
    assert pickle.loads(pickle.dumps(made.session_factory)).settings.concurrency == 100


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
