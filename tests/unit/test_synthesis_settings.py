"""Settings of a synthesis: what is refused, what counts for its identity, its file."""

import pytest

from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed_extras.synthesis.endpoint_settings import OpenAICompatible
from rayembed_extras.synthesis.settings import VLLM, SynthesisRun


def run_with(*assignments: str) -> SynthesisRun:
    return override(SynthesisRun(), assignments)


def test_the_defaults_are_the_papers() -> None:
    config = SynthesisRun().synthesis
    assert sum(config.examples.values()) == 120_000
    assert set(config.examples.values()) == {40_000}
    tasks = sum(count // config.examples_per_task for count in config.examples.values())
    assert tasks == 60_000
    assert config.llm.model == "mistralai/Mixtral-8x22B-Instruct-v0.1"


def test_settings_by_their_path() -> None:
    run = run_with(
        "synthesis.examples.short-long=10",
        "synthesis.llm.url=https://host/v1",
        "synthesis.llm.api_key_env=WRITER_KEY",
        "synthesis.languages={en: English, fr: French}",
        "synthesis.topics=[pumps, valves]",
    )
    assert run.synthesis.examples["short-long"] == 10
    assert run.synthesis.examples["long-short"] == 40_000
    assert isinstance(run.synthesis.llm, OpenAICompatible)
    assert run.synthesis.languages == {"en": "English", "fr": "French"}
    assert run.synthesis.topics == ("pumps", "valves")
    engine = run_with("synthesis.llm.kind=vllm", "synthesis.llm.tensor_parallel=8").synthesis.llm
    assert engine == VLLM(tensor_parallel=8)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("synthesis.example.short-long=1", "did you mean 'examples'?"),
        ("synthesis.examples.long-long=1", "'short-long'"),
        ("synthesis.examples={}", "at least 1"),
        ("synthesis.languages={}", "at least 1"),
        ("synthesis.temperature=0", "greater than 0"),
        ("synthesis.llm.kind=openai", "must be one of 'http', 'vllm'"),
        ("synthesis.llm.url=host:8000", "begin with http"),
        ("synthesis.llm.url=https://user:word@host/v1", "the address holds"),
        ("synthesis.llm.url=https://host/v1?api_key=abc", "the address holds"),
        ("name=a/b", "name"),
        ("placement.storage_path=s3://key:word@bucket", "the address holds"),
        ("placement.storage_path=", "at least 1"),
    ],
)
def test_refused(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as told:
        run_with(assignment)
    assert message in str(told.value)


def test_a_key_in_place_of_its_variables_name_is_refused_and_not_repeated() -> None:
    for key in ("sk-4f8a9c1e", "4f8a9c1e77", "gsk_abcdef"):
        with pytest.raises(ConfigError) as told:
            run_with(f"synthesis.llm.api_key_env={key}")
        assert "name of an environment variable" in str(told.value)
        assert key not in str(told.value)


def test_an_answer_must_leave_room_for_its_prompt() -> None:
    llm = {"kind": "vllm", "max_model_length": 2048}
    with pytest.raises(ConfigError, match="max_tokens 3072 leaves no room"):
        parse(SynthesisRun, {"synthesis": {"llm": llm}})


def test_its_file_is_read_back(tmp_path) -> None:
    run = run_with("synthesis.llm.kind=vllm", "synthesis.topics=['yes', '1.10']", "seed=3")
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    assert SynthesisRun.read(tmp_path / "run.yaml") == run


def test_identity_leaves_out_name_and_place_and_the_order_of_kinds() -> None:
    run = SynthesisRun()
    assert run_with("name=other", "placement.storage_path=/x").fingerprint == run.fingerprint
    assert run_with("seed=1").fingerprint != run.fingerprint
    one = run_with("synthesis.examples={short-long: 1, long-short: 2}")
    other = run_with("synthesis.examples={long-short: 2, short-long: 1}")
    assert one.fingerprint == other.fingerprint
