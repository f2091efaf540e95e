"""Label repair: planted false negatives, what each action makes of them, judges, kills, parts."""

import json
import pickle
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_server import ChatServer, Reply, chat_server, completion
from mining_step import prepared
from tiny_models import save_cross_encoder, save_encoder

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.config.stage_data import without_negatives
from rayembed.data.audit import AUDIT, write_folder_audit
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import read_records
from rayembed.data.engine.work_items import Result, in_process
from rayembed.data.plan.audit import folders_of
from rayembed.data.plan.order import PlanConfig
from rayembed.data.plan.write import write_plan
from rayembed.data.records import Negative, Record
from rayembed.data.sources.earlier import RecordsSource
from rayembed.data.vectors.teacher import TeacherLoader
from rayembed.data.words import normalised_hash
from rayembed.errors import ArtifactError, AssetError, ConfigError, DataError
from rayembed_extras.synthesis.answers import RejectedAnswer
from rayembed_extras.synthesis.repair.prompts import judge_prompt, read_relevant
from rayembed_extras.synthesis.repair.repair import make_repaired, repaired
from rayembed_extras.synthesis.repair.verdicts import JudgeVerdict
from rayembed_extras.synthesis.requests import ChatAnswer

FALSE = "says the same"
"""Words of the negatives that answer their query after all."""


def made_rows(count: int = 40) -> list[Record]:
    """Rows with up to four negatives, of which two in seven are planted false ones."""
    rng = np.random.default_rng(3)
    rows = []
    for i in range(count):
        planted = rng.random(int(rng.integers(0, 5))) < 2 / 7
        negatives = tuple(
            Negative(
                f"Document {i}.{j} {FALSE if false else 'of something else'}",
                rank=j,
                score=0.75 - j / 8,
                rule="top_k",
                teacher="weights",
            )
            for j, false in enumerate(planted)
        )
        positives = tuple(f"document {i} answers {n}" for n in range(1 + i % 2))
        rows.append(Record(f"d/{i}", f"query {i}", positives, "d", negatives, positive_score=0.875))
    return rows


def is_planted(negative: Negative) -> bool:
    return FALSE in negative.text


def dataset_of(judge: dict[str, Any], action: str = "relabel") -> DatasetConfig:
    source = {"kind": "pairs", "path": "none", "negatives": "negatives"}
    repair = {"judge": judge, "action": action}
    return parse(DatasetConfig, {"name": "d", "source": source, "repair": repair})


def by_words(config: Any, weights: str, device: str) -> Any:
    """A cross-encoder that knows: 0.9 for what says the same, 0.8 and 0.7 for positives, else 0.3.

    What says the same in a row whose number ends in 5 scores 0.75.
    """
    assert weights == "weights of reranker"

    def one(query: str, text: str) -> float:
        if FALSE in text:
            return 0.75 if query.endswith("5") else 0.9
        return 0.8 - text.count("answers 1") / 10 if "answers" in text else 0.3

    return lambda pairs: np.array([one(*pair) for pair in pairs], dtype=np.float32)


@pytest.fixture(autouse=True)
def knowing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayembed.data.mining.rescoring.load_cross_encoder", by_words)


def context_of(folder: Path, execute: Any = in_process) -> PipelineContext:
    loader = TeacherLoader(fingerprint=lambda reference: f"weights of {reference}")
    return PipelineContext(str(folder / "out"), 0, execute, loader)


def repair(
    folder: Path,
    rows: Sequence[Record],
    dataset: DatasetConfig,
    parts: int = 1,
    execute: Any = in_process,
) -> tuple[list[Record], DatasetArtifact]:
    before = prepared(folder, list(rows), parts)
    made = make_repaired(context_of(folder, execute), dataset, before)
    return [record for part in made.parts for record in read_records(part.path)], made


RERANKER = {"kind": "cross_encoder", "model": "reranker"}


def test_planted_false_negatives_are_found_and_nothing_else_is_lost(tmp_path: Path) -> None:
    rows = made_rows()
    planted = {n.text for row in rows for n in row.negatives if is_planted(n)}
    others = {n.text for row in rows for n in row.negatives if not is_planted(n)}
    assert len(planted) > 15 < len(others)
    found, made = repair(tmp_path, rows, dataset_of(RERANKER | {"margin": 0.04}, "drop"))
    # With one positive of 0.8, the 0.75 of rows in 5 is no more than the margin allows; with a
    # second one of 0.7, the lower counts.
    hard = {
        n.text
        for row in rows
        for n in row.negatives
        if is_planted(n) and row.query.endswith("5") and len(row.positives) == 1
    }
    left = {n.text for row in found for n in row.negatives}
    assert left & planted == hard
    assert left - planted == others  # wrongly dropped: none
    told = made.manifest
    assert told["false_negatives"] == {"scores above the positive": len(planted) - len(hard)}
    assert told["judged_negatives"] == len(planted) + len(others)
    assert told["unjudged"] == {"no negative": sum(not row.negatives for row in rows)}
    assert told["judged_rows"] + told["unjudged"]["no negative"] == len(rows) == told["rows_out"]
    assert told["dropped_negatives"] == len(planted) - len(hard)
    assert told["relabelled"] == told["rows_added"] == 0
    assert told["without_negatives"] == sum(not row.negatives for row in found)
    before = sum(len(row.negatives) for row in rows) / len(rows)
    after = sum(len(row.negatives) for row in found) / len(rows)
    assert told["negatives_per_row"] == {"before": round(before, 3), "after": round(after, 3)}
    # The batch's masks know what was dropped.
    for was, row in zip(rows, found, strict=True):
        gone = [n.text for n in was.negatives if n not in row.negatives]
        assert row.false_negatives == tuple(map(normalised_hash, gone))
        assert row.positives == was.positives
    RecordsSource(path=made.folder).check(dataset_of(RERANKER))


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({"margin": 0.0}, {0.9, 0.75}),
        ({"margin": 0.1}, {0.9}),
        ({"margin": None, "min_score": 0.8}, {0.9}),
        ({"margin": -0.45, "min_score": 0.2}, {0.9, 0.75, 0.3}),
        ({"margin": 0.0, "min_score": 0.95}, set()),
    ],
)
def test_limits_of_a_reranker(limits: dict[str, Any], found: set[float], tmp_path: Path) -> None:
    rows = [
        Record(
            f"d/{i}",
            f"query {i}",
            ("document answers 1",),
            "d",
            (Negative(f"{i} {FALSE}"), Negative(f"{i} of something else")),
        )
        for i in (1, 5)
    ]
    done, made = repair(tmp_path, rows, dataset_of(RERANKER | limits, "drop"))
    texts = {n.text for row in rows for n in row.negatives}
    gone = texts - {n.text for row in done for n in row.negatives}
    score = by_words(None, "weights of reranker", "cpu")
    query = {n.text: row.query for row in rows for n in row.negatives}
    seen = {round(float(score([(query[text], text)])[0]), 2) for text in gone}
    assert seen == found
    assert sum(made.manifest["false_negatives"].values()) == len(gone)


def test_what_each_action_makes_of_a_row() -> None:
    negatives = tuple(Negative(text, score=s) for text, s in (("A ", 0.5), ("b", 0.25), ("c", 0.0)))
    row = Record("d/1", "query", ("p", "q"), "d", negatives, positive_score=0.75)
    verdict = JudgeVerdict(frozenset({0, 2}), "answers the query")
    assert repaired(row, JudgeVerdict(), "relabel") == [row]
    assert repaired(row, verdict, "drop_row") == []
    (dropped,) = repaired(row, verdict, "drop")
    assert [n.text for n in dropped.negatives] == ["b"]
    assert dropped.positives == ("p", "q")
    assert dropped.false_negatives == (normalised_hash("a"), normalised_hash("c"))
    first, *further = repaired(row, verdict, "relabel")
    assert first.positives == ("p", "q", "A ", "c")
    assert first.positive_score == 0.75
    # The first draw takes the first positive: each relabelled one is that of a further row.
    assert [one.positives for one in further] == [("A ", "p", "q", "c"), ("c", "p", "q", "A ")]
    assert [one.positive_score for one in further] == [0.5, 0.0]
    # Every row trains its positives in turn, each with its own score; "q" has none.
    assert first.positive_scores == (0.75, None, 0.5, 0.0)
    assert further[1].positive_scores == (0.0, 0.75, None, 0.5)
    assert [one.id for one in further] == ["d/1#0", "d/1#2"]
    assert {one.query for one in further} == {"query"}
    assert all([n.text for n in one.negatives] == ["b"] for one in (first, *further))


def test_counts_of_relabelled_and_dropped_rows(tmp_path: Path) -> None:
    rows = made_rows()
    false = sum(is_planted(n) for row in rows for n in row.negatives)
    with_false = sum(any(map(is_planted, row.negatives)) for row in rows)
    judge = RERANKER | {"margin": None, "min_score": 0.75}
    found, made = repair(tmp_path, rows, dataset_of(judge))
    assert made.manifest["rows_in"] == len(rows)
    assert made.manifest["rows_out"] == len(rows) + false == len(found)
    assert made.manifest["rows_added"] == made.manifest["relabelled"] == false
    assert made.manifest["rows_with_false_negatives"] == with_false
    assert len({row.id for row in found}) == len(found)
    assert not any(map(is_planted, (n for row in found for n in row.negatives)))
    found, made = repair(tmp_path, rows, dataset_of(judge, "drop_row"))
    assert made.manifest["dropped"] == {"has a false negative": with_false}
    assert [row.id for row in found] == [
        row.id for row in rows if not any(map(is_planted, row.negatives))
    ]


def test_a_raised_number_of_vectors_has_the_reranker_judge_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = prepared(tmp_path, made_rows(), 1)
    context, dataset = context_of(tmp_path), dataset_of(RERANKER)
    first = make_repaired(context, dataset, before)
    assert make_repaired(context, dataset, before).reused
    monkeypatch.setattr("rayembed_extras.synthesis.repair.repair.VECTORS", "raised")
    other = make_repaired(context, dataset, before)
    assert other.folder != first.folder
    assert not other.reused


def test_a_plan_finds_the_folders_that_its_repaired_rows_come_from(tmp_path: Path) -> None:
    _, made = repair(tmp_path, made_rows(), dataset_of(RERANKER))
    config = PlanConfig({"d": 1.0}, 4, 0, 2, 0, True)
    folder = str(tmp_path / "out" / "plans" / "stage")
    inputs = {"d": made.fingerprint}
    plan = write_plan(folder, {"d": made.parts}, config, inputs=inputs, execute=in_process)
    # The repaired rows are found; what they were made of is no folder of the storage here.
    with pytest.raises(ArtifactError, match="no folder of the records d-before 1 below"):
        folders_of(plan)


def test_a_repair_that_leaves_no_row_fails(tmp_path: Path) -> None:
    rows = [row for row in made_rows() if any(map(is_planted, row.negatives))]
    judge = RERANKER | {"margin": None, "min_score": 0.5}
    with pytest.raises(DataError, match=r"the repair removes all of its 1\d rows"):
        repair(tmp_path, rows, dataset_of(judge, "drop_row"))


def contents(made: DatasetArtifact) -> dict[str, bytes]:
    folder = Path(made.folder)
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def told_of(made: DatasetArtifact) -> dict[str, Any]:
    return {**made.manifest, "seconds": 0}


class Dies:
    """Runs so many items, then is killed."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, task: Any, items: Sequence[Any], needs: str = "cpu") -> Iterator[Result]:
        assert needs == "gpu or machine"
        for item in items:
            if not self.after:
                raise KeyboardInterrupt
            self.after -= 1
            yield task(item)


def test_a_killed_repair_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    rows, dataset = made_rows(), dataset_of(RERANKER)
    _, whole = repair(tmp_path / "whole", rows, dataset, 5)
    with pytest.raises(KeyboardInterrupt):
        repair(tmp_path / "killed", rows, dataset, 5, Dies(3))
    assert not list((tmp_path / "killed").rglob("manifest.json"))
    with pytest.raises(KeyboardInterrupt):  # three of five are done: a third is not
        repair(tmp_path / "killed", rows, dataset, 5, Dies(1))
    _, resumed = repair(tmp_path / "killed", rows, dataset, 5, Dies(1))
    assert contents(resumed) == contents(whole)
    assert told_of(resumed) == told_of(whole)
    _, again = repair(tmp_path / "killed", rows, dataset, 5, Dies(0))
    assert again.reused


def test_parts_do_not_change_the_rows(tmp_path: Path) -> None:
    rows = made_rows()
    found, made = repair(tmp_path / "one", rows, dataset_of(RERANKER))
    several, also = repair(tmp_path / "several", rows, dataset_of(RERANKER), 7)
    assert found == several
    names = ("false_negatives", "repair_examples", "negatives_per_row", "unjudged")
    assert all(made.manifest[name] == also.manifest[name] for name in names)
    other, _ = repair(tmp_path / "one", rows, dataset_of(RERANKER | {"margin": 0.15}))
    assert found != other  # the control


def by_pickle(task: Any, items: Sequence[Any], needs: str = "cpu") -> Iterator[Result]:
    """As another process: of task and items it has what pickles. Results come in order."""
    for item in items:
        again = pickle.loads(pickle.dumps((task, item)))
        yield again[0](again[1])


def test_other_processes_find_the_same(tmp_path: Path) -> None:
    rows = made_rows()
    with chat_server(reply=knows) as server:
        for judge in (RERANKER, endpoint(server)):
            folder = tmp_path / judge["kind"]
            found, _ = repair(folder / "here", rows, dataset_of(judge), 3)
            also, _ = repair(folder / "there", rows, dataset_of(judge), 3, by_pickle)
            assert found == also


def test_the_page_shows_rows_before_and_after(tmp_path: Path) -> None:
    _, made = repair(tmp_path, made_rows(), dataset_of(RERANKER))
    page = Path(write_folder_audit(made)).read_text()
    assert Path(made.folder, AUDIT).exists()
    assert "Rows before and after" in page
    assert "false negative, now a positive (scores above the positive):</span> Document" in page
    assert "False negatives by reason" in page
    assert "[0.900]" in page


def test_a_reranker_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    folder = str(save_cross_encoder(tmp_path / "reranker"))
    dataset = dataset_of({"kind": "cross_encoder", "model": folder, "max_length": 24}, "drop")
    assert dataset.repair is not None
    dataset.repair.judge.check("repair.judge")
    before = prepared(tmp_path, made_rows(12), 1)
    context = PipelineContext(str(tmp_path / "out"), 0)
    made = make_repaired(context, dataset, before)
    assert 0 < sum(made.manifest["false_negatives"].values()) < made.manifest["judged_negatives"]
    wrong = dataset_of({"kind": "cross_encoder", "model": str(save_encoder(tmp_path / "encoder"))})
    assert wrong.repair is not None
    with pytest.raises(AssetError, match=r"repair\.judge\.model cannot be used"):
        wrong.repair.judge.check("repair.judge")


def knows(body: dict[str, Any], before: int) -> Reply:
    """The stub names the candidates that say the same."""
    prompt = body["messages"][0]["content"]
    numbers = [int(n) for n in re.findall(rf"\[(\d+)\] [^\n]*{FALSE}", prompt)]
    return completion(f"I think:\n```json\n{json.dumps({'relevant': numbers})}\n```")


def endpoint(server: ChatServer, **changes: Any) -> dict[str, Any]:
    quick = {"url": server.url, "model": "m", "first_wait_seconds": 0.01, "max_resends": 1}
    return {"kind": "endpoint", "llm": quick, **changes}


def test_a_language_model_is_asked_once_for_each_row(tmp_path: Path) -> None:
    rows = made_rows()
    asked = sum(bool(row.negatives) for row in rows)
    with chat_server(reply=knows) as server:
        found, made = repair(tmp_path, rows, dataset_of(endpoint(server), "drop"), 3)
        assert server.asked.total() == asked
        assert {body["temperature"] for body in server.bodies} == {0.1}
        assert server.most_in_flight > 1
        # Another action asks nothing: the answers are there.
        repair(tmp_path, rows, dataset_of(endpoint(server), "relabel"), 3)
        assert server.asked.total() == asked
    assert not any(map(is_planted, (n for row in found for n in row.negatives)))
    planted = sum(is_planted(n) for row in rows for n in row.negatives)
    others = sum(len(row.negatives) for row in rows) - planted
    assert sum(len(row.negatives) for row in found) == others
    assert made.manifest["false_negatives"] == {"answers the query": planted}
    assert made.manifest["judge"] == "endpoint: m"


def test_a_killed_judge_asks_nothing_twice_and_ends_the_same(tmp_path: Path) -> None:
    rows = made_rows()
    with chat_server(reply=knows) as server:
        judge = endpoint(server)
        judge["llm"]["concurrency"] = 1  # others in flight would be lost with the kill
        dataset = dataset_of(judge)
        _, whole = repair(tmp_path / "whole", rows, dataset, 4)
        server.asked.clear()
        stop = {"after": 11}

        def fails(body: dict[str, Any], before: int) -> Reply:
            stop["after"] -= 1
            return knows(body, before) if stop["after"] >= 0 else Reply(401, "no credit")

        server.reply = fails
        with pytest.raises(AssetError, match="no credit"):
            repair(tmp_path / "killed", rows, dataset, 4)
        server.reply = knows
        _, resumed = repair(tmp_path / "killed", rows, dataset, 4)
        assert set(server.answered.values()) == {2}  # once for each of the two
    assert contents(resumed) == contents(whole)
    assert told_of(resumed) == told_of(whole)


def test_unusable_answers_leave_the_row_and_are_counted(tmp_path: Path) -> None:
    rows = [row for row in made_rows(60) if row.negatives]
    broken = {
        "query 1\n": completion("I cannot help with that."),
        "query 3\n": completion('{"relevant": [9]}'),
        "query 4\n": completion('{"relevant": ["1"]}'),
        "query 6\n": completion('{"rele', "length"),
        "query 7\n": Reply(400, "content filter"),
    }

    def sometimes(body: dict[str, Any], before: int) -> Reply:
        prompt = body["messages"][0]["content"]
        for query, reply in broken.items():
            if f"\n{query}" in prompt:
                return reply
        return knows(body, before)

    with chat_server(reply=sometimes) as server:
        judge = endpoint(server, retries=1, max_failed_share=0.01)
        with pytest.raises(DataError, match=r"max_failed_share 0\.01 allows"):
            repair(tmp_path, rows, dataset_of(judge, "drop"))
        tried = server.asked.total()
        judge = endpoint(server, retries=1, max_failed_share=0.2)
        found, made = repair(tmp_path, rows, dataset_of(judge, "drop"))
        assert server.asked.total() == tried  # raising the share asks nothing anew
    there = {query.strip() for query in broken} & {row.query for row in rows}
    assert len(there) > 2
    was = {row.query: row for row in rows}
    assert all(row == was[row.query] for row in found if row.query in there)
    assert sum(made.manifest["unjudged"].values()) == len(there)
    reasons = {
        "not JSON of the form asked for",
        "the answer names a number that no candidate has",
        "the list of relevant candidates has entries that are not numbers",
        "cut off at max_tokens", "refused by the endpoint",
    }  # fmt: skip
    assert set(made.manifest["unjudged"]) <= reasons
    assert made.manifest["unusable_answers"]


def test_an_unusable_answer_is_asked_for_again_with_another_seed(tmp_path: Path) -> None:
    rows = made_rows(9)

    def first_broken(body: dict[str, Any], before: int) -> Reply:
        prompt = body["messages"][0]["content"]
        with lock:
            first = seen.setdefault(prompt, body["seed"]) == body["seed"]
        return completion("Hm.") if first else knows(body, before)

    with chat_server(reply=first_broken) as server:
        seen: dict[str, int] = {}
        lock = server.lock
        found, made = repair(tmp_path, rows, dataset_of(endpoint(server), "drop"))
        assert server.asked.total() == 2 * sum(bool(row.negatives) for row in rows)
    assert not any(map(is_planted, (n for row in found for n in row.negatives)))
    assert "unusable_answers" not in made.manifest


def test_the_prompt_and_what_is_read_of_an_answer() -> None:
    row = Record(
        "d/1",
        "who {wrote} it",
        ("one two three four",),
        "d",
        (Negative("a b"), Negative("c d e f g")),
        query_instruction="Find the author",
    )
    prompt = judge_prompt(row, 3)
    assert "The search task: Find the author" in prompt
    assert "who {wrote} it" in prompt
    assert "- one two three …" in prompt
    assert "[1] a b\n\n[2] c d e …" in prompt

    def read(text: str) -> frozenset[int]:
        return read_relevant(ChatAnswer("", "", "", "answered", text), 2)

    assert read('{"relevant": [2]}') == {1}
    assert read('<think>{"relevant": [1]}</think> {"relevant": []}') == frozenset()
    for text in ('{"relevant": [0]}', '{"relevant": [true]}', '{"relevant": 1}', "[1]", ""):
        with pytest.raises(RejectedAnswer):
            read(text)


@pytest.mark.parametrize(
    ("judge", "told"),
    [
        (RERANKER | {"margin": None}, "margin and min_score are both null"),
        (RERANKER | {"margn": 0.1}, "did you mean 'margin'"),
        ({"kind": "oracle"}, "oracle"),
        ({"kind": "endpoint", "llm": {"url": "ftp://x"}}, "begin with http"),
    ],
)
def test_wrong_settings_are_refused(judge: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        dataset_of(judge)


def test_repair_needs_negatives_and_positives() -> None:
    source = {"kind": "pairs", "path": "none"}
    values = {"name": "d", "source": source, "repair": {"judge": RERANKER}}
    with pytest.raises(ConfigError, match="the rows have no hard negatives; mine some"):
        parse(DatasetConfig, values)
    assert parse(DatasetConfig, values | {"mining": {"teacher": "t"}}).repair is not None
    graded = {"kind": "graded", "path": "none"}
    with pytest.raises(ConfigError, match="repair treats every pair"):
        parse(DatasetConfig, values | {"source": graded})


def test_an_endpoint_that_is_not_there_is_told_early(tmp_path: Path) -> None:
    with chat_server() as server:
        here = dataset_of(endpoint(server))
        assert here.repair is not None
        here.repair.judge.check_endpoint("repair.judge", str(tmp_path))
        keyed = dataset_of({"kind": "endpoint", "llm": {"api_key_env": "NO_SUCH_KEY"}})
        assert keyed.repair is not None
        with pytest.raises(
            ConfigError,
            match=r"repair\.judge\.llm\.api_key_env names the environment variable NO_SUCH",
        ):
            keyed.repair.judge.check_endpoint("repair.judge", str(tmp_path))
    with pytest.raises(ConfigError, match=r"repair\.judge\.llm\.url = .*: nothing answers there"):
        here.repair.judge.check_endpoint("repair.judge", str(tmp_path))
    # One that has answered may have answered everything.
    with chat_server(reply=knows) as server:
        asked = dataset_of(endpoint(server))
        repair(tmp_path, made_rows(), asked)
    assert asked.repair is not None
    asked.repair.judge.check_endpoint("repair.judge", str(tmp_path / "out"))


def test_rows_without_negatives_are_not_repaired():
    given = {"kind": "pairs", "path": "pairs.jsonl", "negatives": "wrong"}
    judge = {"kind": "cross_encoder", "model": "m"}
    dataset = parse(DatasetConfig, {"name": "p", "source": given, "repair": {"judge": judge}})
    without = without_negatives(dataset)
    assert without.source.negatives is None
    assert without.repair is None
