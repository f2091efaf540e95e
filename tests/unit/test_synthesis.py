"""Synthesis with a fake LLM: nothing is asked twice, nothing is lost, everything can be read."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM, failed

from rayembed.config.data_run import DataRun
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import read_records
from rayembed.data.prepare import prepare_datasets
from rayembed.data.records import Record
from rayembed.errors import AssetError, DataError
from rayembed_extras.synthesis import answer_store
from rayembed_extras.synthesis import requests as requests_module
from rayembed_extras.synthesis.answers import normalised
from rayembed_extras.synthesis.requests import ChatAnswer, ExampleRequest, Request, TaskRequest
from rayembed_extras.synthesis.settings import SynthesisRun
from rayembed_extras.synthesis.synthesize import make_synthetic

EXAMPLES = {"short-long": 30, "long-short": 20, "short-short": 20}


def make_run(storage: Path, name: str = "made", seed: int = 0, **changes: Any) -> SynthesisRun:
    synthesis = {"examples": EXAMPLES, "tasks_per_request": 4, "max_failed_share": 0.2, **changes}
    return parse(
        SynthesisRun,
        {
            "name": name,
            "seed": seed,
            "synthesis": synthesis,
            "placement": {"storage_path": str(storage)},
        },
    )


def records_of(prepared: DatasetArtifact) -> list[Record]:
    return [record for part in prepared.parts for record in read_records(part.path)]


def test_records_of_all_kinds(tmp_path: Path) -> None:
    llm = FakeLLM()
    prepared = make_synthetic(make_run(tmp_path), "fake", llm)
    records = records_of(prepared)
    assert len(records) == 70 == prepared.manifest["rows_out"]
    assert {r.id: 0 for r in records}.keys() == {
        f"made/{kind}/{i}" for kind, count in EXAMPLES.items() for i in range(count)
    }
    by_kind = {kind: [r for r in records if f"/{kind}/" in r.id] for kind in EXAMPLES}
    assert {len(r.negatives) for r in by_kind["short-long"]} == {2}
    assert {len(r.negatives) for r in by_kind["long-short"]} == {1}
    assert {len(r.negatives) for r in by_kind["short-short"]} == {1}
    assert {n.rule for r in records for n in r.negatives} == {"synthetic"}
    labelled = by_kind["long-short"]
    assert {(r.task, r.in_batch) for r in labelled} == {("classification", False)}
    assert all(r.label == normalised(r.positives[0]) for r in labelled)
    for kind in ("short-long", "short-short"):
        assert {(r.task, r.in_batch, r.label) for r in by_kind[kind]} == {("retrieval", True, None)}
    for r in records:
        assert r.dataset == "made"
        assert r.language == "en"
        assert r.query_instruction.startswith("Given a ")
        assert r.origin == (r.id.removeprefix("made/").replace("/", "/examples/") + "#0",)
    # Two examples of each task, no task twice.
    tasks = [r.query_instruction for r in by_kind["short-long"]]
    assert len({normalised(task) for task in tasks}) == 15
    assert {tasks.count(task) for task in tasks} == {2}
    assert set(llm.asked.values()) == {1}


def test_the_manifest_tells_what_came(tmp_path: Path) -> None:
    prepared = make_synthetic(make_run(tmp_path), "fake", FakeLLM(broken_share=0.4))
    found = json.loads((Path(prepared.folder) / "manifest.json").read_text())
    assert found["kind"] == "synthetic"
    assert found["asked"] == EXAMPLES
    assert found["rows_in"] == 70
    rejected = sum(found["rejected"].values())
    assert 0 < rejected == sum(found["rejected_by_kind"].values())
    assert found["rows_in"] == found["rows_out"] + rejected + sum(found["dropped"].values())
    assert sum(found["records"].values()) == found["rows_out"] == len(records_of(prepared))
    assert sum(found["failed_tries"].values()) > rejected, "most succeed when asked again"
    assert "not JSON of the form asked for" in found["failed_tries"]
    assert "misleading_label is missing" in found["failed_tries"]
    assert found["tasks"] == {"short-long": 15, "long-short": 10, "short-short": 10}
    tries = found["rows_in"] - rejected + sum(found["failed_tries"].values())
    assert found["tokens"] == {"prompt": 0, "answer": 7 * tries}
    words = found["words"]["short-long positive"]
    assert 50 <= words["least"] <= words["median"] <= words["p90"] <= words["most"] <= 510
    assert len(found["examples"]) == 20
    assert {example["id"].split("/")[1] for example in found["examples"]} == set(EXAMPLES)
    lines = (Path(prepared.folder) / "rejected.jsonl").read_text().splitlines()
    assert len(lines) == rejected
    row = json.loads(lines[0])
    assert row["tries"] == 4
    assert row["id"].endswith("#3")
    assert row["task"]
    page = (Path(prepared.folder) / "audit.html").read_text()
    assert found["examples"][0]["query"] in page


def test_a_data_set_takes_the_records_as_they_are(tmp_path: Path) -> None:
    prepared = make_synthetic(make_run(tmp_path), "fake", FakeLLM())
    source = {"kind": "records", "path": prepared.folder}
    run = parse(
        DataRun, {"name": "take", "data": {"datasets": [{"name": "own", "source": source}]}}
    )
    taken = prepare_datasets(run, PipelineContext(str(tmp_path), 0))["own"][-1]
    records = {r.query: r for r in records_of(taken)}
    assert len(records) == 70
    for before in records_of(prepared):
        after = records[before.query]
        assert (after.positives, after.negatives) == (before.positives, before.negatives)
        assert after.query_instruction == before.query_instruction
        assert (after.in_batch, after.label, after.language, after.task) == (
            before.in_batch,
            before.label,
            before.language,
            before.task,
        )


def test_other_settings_ask_only_what_is_new(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    first = FakeLLM()
    prepared = make_synthetic(run, "fake", first)
    again = FakeLLM()
    assert make_synthetic(run, "fake", again).folder == prepared.folder
    assert make_synthetic(run, "fake", again).reused
    assert not again.asked
    more = make_run(tmp_path, examples=EXAMPLES | {"short-long": 50})
    larger = make_synthetic(more, "fake", again)
    assert larger.folder != prepared.folder
    assert not again.asked.keys() & first.asked.keys()
    asked = [id for id in again.asked if "/examples/" in id]
    assert sorted(asked) == sorted(f"short-long/examples/{i}#0" for i in range(30, 50))
    kept = {r.id: r for r in records_of(larger)}
    assert all(kept[r.id] == r for r in records_of(prepared))
    stricter = FakeLLM()
    make_synthetic(make_run(tmp_path, max_failed_share=0.0, retries=1), "fake", stricter)
    assert not stricter.asked
    other = FakeLLM()
    make_synthetic(run, "another model", other)
    assert other.asked == first.asked
    seeded = FakeLLM()
    changed = make_synthetic(make_run(tmp_path, seed=1), "fake", seeded)
    assert records_of(changed)[0].query != records_of(prepared)[0].query
    assert len(seeded.asked) == len(first.asked)


def test_a_killed_synthesis_goes_on_and_ends_the_same(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(answer_store, "_ANSWERS_PER_FILE", 3)
    whole = make_synthetic(make_run(tmp_path / "whole"), "fake", FakeLLM(broken_share=0.3))
    asked: dict[str, int] = {}
    kills = 0
    while True:
        llm = FakeLLM(broken_share=0.3, dies_after=9)
        try:
            prepared = make_synthetic(make_run(tmp_path / "killed"), "fake", llm)
        except KeyboardInterrupt:
            kills += 1
            assert not list((tmp_path / "killed").rglob("manifest.json"))
        for id, times in llm.asked.items():
            asked[id] = asked.get(id, 0) + times
        if llm.asked.total() < 9:
            break
    assert kills > 5
    # A killed iterator still hands over what was answered.
    assert set(asked.values()) == {1}
    assert records_of(prepared) == records_of(whole)
    assert prepared.manifest["parts"] == whole.manifest["parts"]


def test_a_lost_answer_is_asked_for_again_and_moves_no_task(tmp_path: Path) -> None:
    """The first request for tasks is lost, and comes after the tasks were written down."""

    def first_is_lost(request: Request) -> ChatAnswer | None:
        if isinstance(request, TaskRequest) and request.number == 0:
            return failed(request, "lost", "timeout: no answer within 300 s")
        if isinstance(request, ExampleRequest) and request.number >= 4:
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        make_synthetic(make_run(tmp_path), "fake", FakeLLM(answer=first_is_lost))
    again = FakeLLM()
    prepared = make_synthetic(make_run(tmp_path), "fake", again)
    assert not [id for id in again.asked if "/tasks/" in id]
    assert len(records_of(prepared)) == 70


def test_retries_are_bounded_and_have_other_seeds(tmp_path: Path) -> None:
    seeds: dict[int, list[int]] = {}
    prompts: dict[int, set[str]] = {}

    def number_3_and_5_fail(request: Request) -> ChatAnswer | None:
        if not isinstance(request, ExampleRequest) or request.kind != "short-short":
            return None
        if request.number == 3 or (request.number == 5 and request.attempt < 2):
            seeds.setdefault(request.number, []).append(request.sampling_seed)
            prompts.setdefault(request.number, set()).add(request.prompt)
            return dataclasses.replace(failed(request, "answered", ""), text="no", cut_off=True)
        return None

    llm = FakeLLM(answer=number_3_and_5_fail)
    run = make_run(tmp_path, retries=2, examples={"short-short": 20})
    prepared = make_synthetic(run, "fake", llm)
    assert llm.asked["short-short/examples/3#2"] == 1
    assert "short-short/examples/3#3" not in llm.asked
    assert len(set(seeds[3])) == 3
    assert len(prompts[3]) == 1
    by_id = {r.id: r for r in records_of(prepared)}
    assert "made/short-short/3" not in by_id
    assert by_id["made/short-short/5"].origin == ("short-short/examples/5#2",)
    assert prepared.manifest["rejected"] == {"cut off at max_tokens": 1}
    assert prepared.manifest["failed_tries"] == {"cut off at max_tokens": 5}


def test_what_is_lost_is_asked_for_again_in_the_same_and_in_the_next_run(tmp_path: Path) -> None:
    def away(request: Request) -> ChatAnswer | None:
        if isinstance(request, ExampleRequest) and request.number % 2:
            return failed(request, "lost", "HTTP 500: down")
        return None

    run = make_run(tmp_path, examples={"short-short": 20}, retries=1)
    llm = FakeLLM(answer=away)
    with pytest.raises(DataError, match=r"10 of 20 examples .*10 × no answer.*max_failed_share"):
        make_synthetic(run, "fake", llm)
    assert llm.asked["short-short/examples/1#0"] == 2
    assert llm.asked["short-short/examples/0#0"] == 1
    again = FakeLLM()
    prepared = make_synthetic(run, "fake", again)
    assert sorted(again.asked) == sorted(f"short-short/examples/{i}#0" for i in range(1, 20, 2))
    assert len(records_of(prepared)) == 20


def test_a_request_that_the_endpoint_refuses_is_not_asked_for_in_the_same_form(tmp_path) -> None:
    def refuses(request: Request) -> ChatAnswer | None:
        if isinstance(request, ExampleRequest) and request.number == 0:
            return failed(request, "refused", "HTTP 400: content filter")
        return None

    llm = FakeLLM(answer=refuses)
    run = make_run(tmp_path, examples={"short-short": 20}, retries=1)
    prepared = make_synthetic(run, "fake", llm)
    assert prepared.manifest["rejected"] == {"refused by the endpoint": 1}
    row = json.loads((Path(prepared.folder) / "rejected.jsonl").read_text())
    assert row["problem"] == "HTTP 400: content filter"
    assert max(llm.asked.values()) == 1


def test_too_many_failures_fail_the_job_and_say_why(tmp_path: Path) -> None:
    run = make_run(tmp_path, retries=0, max_failed_share=0.1)
    with pytest.raises(DataError) as told:
        make_synthetic(run, "fake", FakeLLM(broken_share=0.5))
    message = str(told.value)
    assert "of 70 examples have no usable answer" in message
    assert "not JSON of the form asked for" in message
    assert "synthesis.max_failed_share 0.1 allows" in message
    assert "#0: " in message
    assert not list(tmp_path.rglob("manifest.json"))
    assert len(list(tmp_path.rglob("rejected.jsonl"))) == 1


def test_an_endpoint_that_refuses_all_or_is_away_ends_the_job_at_once(tmp_path: Path) -> None:
    def wrong_key(request: Request) -> ChatAnswer | None:
        return failed(request, "stopped", "HTTP 401: no such key")

    llm = FakeLLM(answer=wrong_key)
    with pytest.raises(AssetError, match="HTTP 401: no such key"):
        make_synthetic(make_run(tmp_path), "fake", llm)
    assert llm.asked.total() == 1

    def away(request: Request) -> ChatAnswer | None:
        return failed(request, "lost", "ClientConnectorError: refused")

    llm = FakeLLM(answer=away)
    run = make_run(tmp_path, tasks_per_request=1, examples={"short-long": 500})
    with pytest.raises(AssetError, match=r"100 consecutive requests .* are kept"):
        make_synthetic(run, "fake", llm)
    assert llm.asked.total() == 100
    llm = FakeLLM(answer=away)
    with pytest.raises(AssetError, match=r"2 consecutive requests .*ConnectorError: refused"):
        make_synthetic(make_run(tmp_path, examples={"short-long": 10}), "fake", llm)
    assert llm.asked.total() == 2, "fewer than a hundred are lost in one round, too"


def test_a_model_that_repeats_itself_is_asked_for_more_tasks_and_given_up(tmp_path: Path) -> None:
    def few(request: Request) -> ChatAnswer | None:
        if not isinstance(request, TaskRequest):
            return None
        tasks = [f"Given item {(request.number + i) % 9}, retrieve its parts" for i in range(4)]
        return dataclasses.replace(
            failed(request, "answered", ""), text=json.dumps([*tasks, tasks[0].upper()])
        )

    run = make_run(tmp_path, examples={"short-short": 18})
    llm = FakeLLM(answer=few)
    prepared = make_synthetic(run, "fake", llm)
    assert prepared.manifest["tasks"] == {"short-short": 9}
    assert prepared.manifest["task_requests"]["short-short"] > 3
    too_many = make_run(tmp_path, examples={"short-short": 20})
    with pytest.raises(
        DataError, match=r"task_rounds=8 rounds gave only 9 different tasks .* 10 are"
    ):
        make_synthetic(too_many, "fake", FakeLLM(answer=few))


def test_examples_that_repeat_others_are_dropped(tmp_path: Path) -> None:
    def twins(request: Request) -> ChatAnswer | None:
        """0 and 1 share the task and the query, 2 and 4 the pair, 6 and 8 the query alone."""
        texts = {
            0: ("Same query?", "one"),
            1: ("same  QUERY", "two"),
            2: ("a pair", "of texts"),
            4: ("A pair.", "of texts!"),
            6: ("apart", "three"),
            8: ("apart", "four"),
        }
        if not isinstance(request, ExampleRequest) or request.number not in texts:
            return None
        query, positive = texts[request.number]
        example = {"input": query, "positive": positive, "hard_negative": "none of it"}
        return dataclasses.replace(failed(request, "answered", ""), text=json.dumps(example))

    run = make_run(tmp_path, examples={"short-short": 12})
    prepared = make_synthetic(run, "fake", FakeLLM(answer=twins))
    assert prepared.manifest["dropped"] == {"duplicate": 2}
    left = {r.id.rsplit("/", 1)[1] for r in records_of(prepared)}
    assert left == {str(i) for i in range(12)} - {"1", "4"}
    assert prepared.manifest["rows_in"] == 12 == prepared.manifest["rows_out"] + 2


def test_groups_and_parts_of_any_size_give_the_same_records(tmp_path: Path, monkeypatch) -> None:
    whole = make_synthetic(make_run(tmp_path / "a"), "fake", FakeLLM(broken_share=0.2))
    monkeypatch.setattr(requests_module, "REQUESTS_PER_GROUP", 7)
    monkeypatch.setattr("rayembed_extras.synthesis.synthesize.REQUESTS_PER_GROUP", 7)
    monkeypatch.setattr("rayembed_extras.synthesis.synthesize.ROWS_PER_PART", 16)
    cut = make_synthetic(make_run(tmp_path / "b"), "fake", FakeLLM(broken_share=0.2))
    assert len(cut.parts) > 3
    assert records_of(cut) == records_of(whole)
    assert cut.manifest["examples"] == whole.manifest["examples"]


def test_languages_are_drawn_and_told(tmp_path: Path) -> None:
    languages = {"en": "English", "fr": "French", "de": "German"}
    prompts: list[str] = []

    def listens(request: Request) -> ChatAnswer | None:
        if isinstance(request, ExampleRequest):
            prompts.append(request.prompt)
        return None

    run = make_run(tmp_path, languages=languages, examples={"short-short": 60})
    records = records_of(make_synthetic(run, "fake", FakeLLM(answer=listens)))
    for code, name in languages.items():
        number = sum(f"in {name}." in prompt for prompt in prompts)
        assert number == sum(r.language == code for r in records) > 10


def test_topics_are_named_in_turn(tmp_path: Path) -> None:
    prompts: dict[int, str] = {}

    def listens(request: Request) -> ChatAnswer | None:
        if isinstance(request, TaskRequest):
            prompts[request.number] = request.prompt
        return None

    run = make_run(tmp_path, topics=["pumps", "valves"], examples={"short-short": 24})
    make_synthetic(run, "fake", FakeLLM(answer=listens))
    assert [("pumps" in prompts[i], "valves" in prompts[i]) for i in range(3)] == [
        (True, False),
        (False, True),
        (True, False),
    ]
