"""A whole synthesis by an endpoint with faults gives what a plain loop gives."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from chat_server import Reply, chat_server
from fake_llm import FakeLLM

from rayembed.config.document import fingerprint
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import DatasetArtifact
from rayembed.data.engine.parts import read_records
from rayembed.errors import AssetError, ConfigError
from rayembed_extras.synthesis.chat_endpoint import read_key
from rayembed_extras.synthesis.endpoint_settings import OpenAICompatible
from rayembed_extras.synthesis.settings import SynthesisRun
from rayembed_extras.synthesis.synthesize import make_synthetic, synthesize

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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRITER_KEY", "secret")
    with chat_server(reply=faulty, broken_share=BROKEN) as server:
        run = make_run(tmp_path / "asked", server.url, api_key_env="WRITER_KEY")
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


def test_an_endpoint_that_refuses_all_ends_the_job_with_its_words(tmp_path: Path) -> None:
    refuses = chat_server(reply=lambda body, before: Reply(401, "no such key"))
    with refuses as server, pytest.raises(AssetError, match="HTTP 401: no such key"):
        synthesize(make_run(tmp_path, server.url))
    assert server.asked.total() < 30


def test_a_missing_key_is_told_before_anything_is_asked(monkeypatch) -> None:
    monkeypatch.delenv("WRITER_KEY", raising=False)
    with pytest.raises(ConfigError, match="WRITER_KEY, which is not set"):
        read_key(OpenAICompatible(api_key_env="WRITER_KEY"), "synthesis.llm")
    assert read_key(OpenAICompatible(), "synthesis.llm") is None
