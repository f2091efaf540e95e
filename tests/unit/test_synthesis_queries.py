"""Queries that a language model writes for documents: what is asked, kept, counted, asked again."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, Reply, chat_server, completion

from rayembed.config.data_run import DataRun
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import read_records
from rayembed.data.prepare import prepare_datasets
from rayembed.data.records import Record
from rayembed.errors import AssetError, ConfigError, DataError
from rayembed.pipeline.checks.network import check_endpoints
from rayembed_extras.synthesis.answers import RejectedAnswer
from rayembed_extras.synthesis.queries import QueriesSource
from rayembed_extras.synthesis.requests import ChatAnswer
from rayembed_extras.synthesis.write_queries import queries_prompt, read_queries


def documents(count: int = 60) -> list[dict[str, Any]]:
    rows = [{"text": f"Town {i} lies by a river.", "lang": "en"} for i in range(count)]
    return [*rows, rows[3], {"text": ""}]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def writes(body: dict[str, Any], before: int) -> Reply:
    """The stub writes as many queries as are asked for, about the number of the document."""
    prompt = body["messages"][0]["content"]
    count, town = re.search(r"Write (\d+)", prompt), re.search(r"Town (\d+)", prompt)
    assert count is not None
    assert town is not None
    asked = [f"which river is {town[1]} at, {n}?" for n in range(int(count[1]))]
    return completion(f"Here: {json.dumps({'queries': asked})}")


def run_of(server: ChatServer, path: str, held_out: Any = None, **changes: Any) -> DataRun:
    llm = {"url": server.url, "model": "m", "first_wait_seconds": 0.01, "max_resends": 0}
    source = {"kind": "queries", "path": path, "llm": llm, "max_rejected_share": 0.1, **changes}
    dataset = {"name": "d", "source": source, "held_out": held_out, "query_instruction": "Find it"}
    return parse(DataRun, {"name": "run", "data": {"datasets": [dataset]}})


def prepare(folder: Path, run: DataRun) -> tuple[list[Record], DatasetArtifact]:
    (made,) = prepare_datasets(run, PipelineContext(str(folder), run.seed))["d"]
    return [record for part in made.parts for record in read_records(part.path)], made


def manifest_of(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("data/synthetic/*/manifest.json")
    return json.loads(path.read_text())


def test_each_document_has_its_queries_and_is_asked_about_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", documents())
    with chat_server(reply=writes) as server:
        run = run_of(server, path, per_document=2, language="lang", wanted="questions of tourists.")
        found, made = prepare(tmp_path / "out", run)
        assert server.asked.total() == 60
        again, _ = prepare(tmp_path / "out", run)
        other = run_of(server, path, {"kind": "fraction", "share": 0.2}, per_document=2)
        kept, _ = prepare(tmp_path / "out", other)  # a language less: the same questions
        assert server.asked.total() == 120  # but for the wish
        assert "Wanted are questions of tourists. Use" in server.bodies[0]["messages"][0]["content"]
    assert again == found
    assert len(found) == 120
    for record in found:
        number = re.search(r"Town (\d+)", record.positives[0])
        assert number is not None
        assert record.query.startswith(f"which river is {number[1]} at, ")
        assert record.language == "en"
        assert record.query_instruction == "Find it"
        assert re.fullmatch(r"a\.jsonl@\d+", record.origin[0])
    told = made.manifest
    assert told["made_of"] is None
    assert len(kept) == 96  # twelve documents, with both queries of each
    (corpus,) = (tmp_path / "out").glob("data/held_out/*/beir/corpus.jsonl")
    held_out = {json.loads(line)["text"] for line in corpus.read_text().splitlines()}
    assert len(held_out) == 12
    assert held_out.isdisjoint(record.positives[0] for record in kept)


@pytest.mark.parametrize(
    ("reply", "cause", "advice"),
    [
        (Reply(500, "out of memory"), "HTTP 500: out of memory", "see to the server at"),
        (Reply(429, "slow down"), "HTTP 429: slow down", "see to the server at"),
        (Reply(200, "<html>a proxy</html>"), "no completion: <html>a proxy", "see to the server"),
        (Reply(200, '{"choices": ['), 'no completion: {"choices"', "see to the server at"),
        (Reply(400, "seed is no field"), "HTTP 400: seed is no field", "send_seed"),
        (completion("I cannot"), "I cannot", "raise data.datasets.d.source.retries or max_tokens"),
    ],
)
def test_an_endpoint_that_gives_nothing_says_why_and_is_not_asked_for_ever(
    reply: Reply, cause: str, advice: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", documents()[:30])
    with chat_server(reply=lambda body, before: reply) as server:
        run = run_of(server, path, retries=2)
        llm = run.data.datasets[0].source.llm.model_copy(update={"max_resends": 3})
        source = run.data.datasets[0].source.model_copy(update={"llm": llm})
        dataset = run.data.datasets[0].model_copy(update={"source": source})
        data = run.data.model_copy(update={"datasets": (dataset,)})
        with pytest.raises(DataError) as error:
            prepare(tmp_path / "out", run.model_copy(update={"data": data}))
        lost = reply.status in (429, 500) or reply.body.startswith(("<", '{"choices": ['))
        # Either sent again because no answer came, or asked again because it is of no use.
        assert server.asked.total() == (4 if lost else 3) * len(documents()[:30])
    told = str(error.value)
    assert cause in told
    assert advice in told
    assert ("max_tokens" in told) == (reply.body == completion("I cannot").body)


def test_counts_and_the_page(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", documents())
    with chat_server(reply=writes) as server:
        found, _ = prepare(tmp_path / "out", run_of(server, path, documents=25))
        assert server.asked.total() == 25
        told = manifest_of(tmp_path / "out")
        assert told["rejected"] == {"no text": 1, "not drawn": 36}
        assert told["rows_in"] == 62
        assert told["rows_out"] == told["documents"] == len(found) == 25
        assert list((tmp_path / "out").glob("data/synthetic/*/audit.html"))
        # The draw depends on texts alone.
        turned = write(tmp_path / "b.jsonl", documents()[::-1])
        also, _ = prepare(tmp_path / "turned", run_of(server, turned, documents=25))
        assert {r.query for r in also} == {r.query for r in found}
        seeded = run_of(server, path, documents=25).model_copy(update={"seed": 1})
        others, _ = prepare(tmp_path / "seeded", seeded)
        assert {r.query for r in others} != {r.query for r in found}


def test_a_killed_writing_asks_nothing_twice_and_ends_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", documents())
    left = {"answers": 17}

    def fails(body: dict[str, Any], before: int) -> Reply:
        left["answers"] -= 1
        return writes(body, before) if left["answers"] >= 0 else Reply(402, "no credit")

    with chat_server(reply=writes) as server:
        run = run_of(server, path)
        source = run.data.datasets[0].source
        slow = source.model_copy(update={"llm": source.llm.model_copy(update={"concurrency": 1})})
        dataset = run.data.datasets[0].model_copy(update={"source": slow})
        run = run.model_copy(update={"data": run.data.model_copy(update={"datasets": (dataset,)})})
        whole, _ = prepare(tmp_path / "whole", run)
        server.answered.clear()
        server.reply = fails
        with pytest.raises(AssetError, match="no credit"):
            prepare(tmp_path / "killed", run)
        server.reply = writes
        resumed, _ = prepare(tmp_path / "killed", run)
        assert set(server.answered.values()) == {1}
    assert resumed == whole
    never_equal = {"seconds": 0, "digest": ""}  # the digest is of the file, and so of its seconds
    told = [manifest_of(tmp_path / name) | never_equal for name in ("whole", "killed")]
    assert told[0] == told[1]


def test_too_many_bad_rows_or_answers_fail(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", documents(20))

    def some(body: dict[str, Any], before: int) -> Reply:
        broken = "Town 7 " in body["messages"][0]["content"]
        return completion('{"queries": []}') if broken else writes(body, before)

    with chat_server(reply=some) as server:
        with pytest.raises(DataError, match="1 × too few usable queries"):
            prepare(tmp_path / "out", run_of(server, path, max_failed_share=0.01))
        found, _ = prepare(tmp_path / "out", run_of(server, path, max_failed_share=0.1))
        assert len(found) == 19
        assert manifest_of(tmp_path / "out")["rejected"]["too few usable queries"] == 1
        with pytest.raises(DataError, match=r"1 of 22 rows of .* have no document"):
            prepare(tmp_path / "bad", run_of(server, path, max_rejected_share=0.01))
        empty = write(tmp_path / "empty.jsonl", [{"text": ""}])
        with pytest.raises(DataError, match="has a usable document"):
            prepare(tmp_path / "empty", run_of(server, empty, max_rejected_share=1.0))
        run = run_of(server, path)
        check_endpoints(run.data.datasets, str(tmp_path / "new"))
    with pytest.raises(ConfigError, match=r"data\.datasets\.d\.source\.llm\.url = .*: nothing ans"):
        check_endpoints(run.data.datasets, str(tmp_path / "new"))
    check_endpoints(run.data.datasets, str(tmp_path / "out"))  # it may have answered all


def test_where_a_model_is_asked_is_no_identity() -> None:
    here, there, other = ChatServer("http://a/v1"), ChatServer("http://b/v1"), {"model": "n"}
    run = run_of(here, "x.jsonl")
    assert run.fingerprint == run_of(there, "x.jsonl").fingerprint
    assert run.fingerprint != run_of(here, "x.jsonl", llm=other).fingerprint


def test_the_prompt_and_what_is_read_of_an_answer() -> None:
    source = parse(QueriesSource, {"kind": "queries", "path": "x", "max_words": 3})
    prompt = queries_prompt(source, "one {two} three four")
    assert prompt.startswith("Write 1 search query that the document below answers")
    assert "Document:\none {two} three …\n" in prompt
    assert '{"queries": [1 texts]}' in prompt

    def read(text: str, count: int = 2) -> tuple[str, ...]:
        return read_queries(ChatAnswer("", "", "", "answered", text), count)

    assert read('{"queries": ["a b", "A  b!", "c", "d"]}') == ("a b", "c")
    for text in (
        '{"queries": ["a"]}',
        '{"queries": [1, 2]}',
        '["a", "b"]',
        '{"queries": ["", " "]}',
    ):
        with pytest.raises(RejectedAnswer):
            read(text)
