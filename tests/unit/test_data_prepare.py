"""Preparation in one process: manifests, reuse, a kill on the way, errors before training."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_articles import sample_over

from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.parts import read_records
from rayembed.data.engine.work_items import Execute, in_process
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.prepare import prepare
from rayembed.data.sources.check import check_files_at_hand
from rayembed.data.vectors.teacher import TeacherLoader
from rayembed.errors import ConfigError, DataError

TOPICS = ("Arts", "Geography", "Mathematics")
embedded: list[int] = []


def vector(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(8)


def load(config: Any, weights: str, device: str):
    def encode(texts, role):
        embedded.append(len(texts))
        made = [
            vector(sum(map(ord, t))) * 0.2 + vector(int(re.findall(r"\d+", t)[0])) for t in texts
        ]
        return np.array([m / np.linalg.norm(m) for m in made], dtype=np.float32)

    return encode


TEACHING = TeacherLoader(load=load, fingerprint=lambda reference: f"weights of {reference}")


def at(storage: object, execute: Execute = in_process) -> PipelineContext:
    return PipelineContext(str(storage), 0, execute, TEACHING)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    articles = [
        {
            "title": f"Thing {i:02d}",
            "extract": f"Thing {i:02d} is the first subject of number {i}. It has {i} parts here.",
            "description": f"Thing that is called {i}",
            "topic": TOPICS[i % 3],
        }
        for i in range(60)
    ]
    (folder / "articles.json").write_text(json.dumps(articles))
    rows = [{"query": f"query {i}", "positive": f"positive {i}"} for i in range(30)]
    rows += rows[:3]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def make_run(root: Path, **changes: Any) -> Run:
    mining = {"teacher": "small", "num_negatives": 3}
    sample = sample_over(root / "articles.json", held_out=10)
    values: dict[str, Any] = {
        "name": "test",
        "model": {"kind": "biencoder", "backbone": {"path": "none"}, "pooling": {"kind": "mean"}},
        "data": {
            "root": str(root),
            "datasets": [
                {"name": "text", "source": sample.pairs("description"), "mining": mining},
                {
                    "name": "topic",
                    "source": sample.topics(),
                    "in_batch_negatives": False,
                },
                {"name": "own", "source": {"kind": "pairs", "path": "pairs.jsonl"}},
            ],
        },
        "stages": [
            {
                "name": "first",
                "datasets": {"text": 1, "own": 1},
                "batch": {"global_pairs": 8, "num_negatives": 0, "in_batch_negatives": True},
                "optimizer": {"learning_rate": 1e-3},
                "steps": 6,
            },
            {
                "name": "second",
                "datasets": {"text": 1, "topic": 1},
                "batch": {"global_pairs": 8, "num_negatives": 3, "in_batch_negatives": False},
                "optimizer": {"learning_rate": 1e-3},
                "steps": 5,
            },
        ],
        "evaluation": {"benchmarks": []},
    }
    for path, value in changes.items():
        here: Any = values
        *above, last = path.split("__")
        for part in above:
            here = here[int(part) if part.isdigit() else part]
        here[last] = value
    return parse(Run, values)


def manifests(storage: Path) -> dict[str, dict[str, Any]]:
    found = storage.glob("data/*/*/manifest.json")
    return {
        p.parent.name.rsplit("-", 1)[0] + ":" + p.parent.parent.name: json.loads(p.read_text())
        for p in found
    }


def test_files_at_hand_are_looked_for_before_anything_is_fetched(root: Path) -> None:
    run = make_run(root)
    check_files_at_hand(run)
    path = "data.datasets.text.source.path="
    with pytest.raises(DataError, match="lost"):
        check_files_at_hand(override(run, [f"{path}lost.jsonl"]))
    # What is fetched is looked at when it is.
    elsewhere = "hf://datasets/nobody/nothing@main/*.parquet"
    check_files_at_hand(override(run, [f"{path}{elsewhere}"]))
    check_files_at_hand(override(run, [f"{path}sample://wikipedia/nothing.jsonl"]))


def test_plans_of_all_stages_and_no_row_lost(root: Path, tmp_path: Path) -> None:
    storage = tmp_path / "out"
    plans = prepare(make_run(root), at(storage))
    assert list(plans) == ["first", "second"]
    first, second = (BatchPlan.open(folder) for folder in plans.values())
    assert (first.num_steps, first.num_negatives, second.num_steps) == (6, 0, 5)
    rows = [r for step in range(5) for r in second.read(step)]
    assert {len(r.negatives) for r in rows} <= {1, 2, 3}
    mined = [n for r in rows if r.dataset == "text" for n in r.negatives]
    assert {(n.rule, n.teacher) for n in mined} == {("top_k_perc_pos", "weights of small")}
    seen = manifests(storage)
    assert sorted(seen) == ["own:records", "text:mined", "text:records", "topic:records"]
    for manifest in seen.values():
        assert manifest["rows_in"] == manifest["records_made"] + sum(manifest["rejected"].values())
        assert manifest["records_made"] == manifest["rows_out"] + sum(manifest["dropped"].values())
    assert seen["own:records"]["dropped"] == {"duplicate": 3}
    assert seen["own:records"]["rows_out"] == 30
    assert seen["text:records"]["rows_in"] == 50, "ten of sixty titles are held out"
    audit = (Path(plans["second"]) / "audit.md").read_text()
    assert "## topic" in audit
    assert "top_k_perc_pos" in audit


def test_what_is_there_is_not_done_again(root: Path, tmp_path: Path) -> None:
    storage = tmp_path / "out"
    done: list[Any] = []

    def counts(task, units, needs):
        for unit in units:
            done.append(unit)
            yield task(unit)

    run = make_run(root)
    plans = prepare(run, at(storage, counts))
    assert done
    before = {p: p.stat().st_mtime_ns for p in storage.rglob("*") if p.is_file()}
    done.clear()
    assert prepare(run, at(storage, counts)) == plans
    assert not done
    assert {p: p.stat().st_mtime_ns for p in storage.rglob("*") if p.is_file()} == before
    # Another margin mines again with the vectors that are there; nothing else is done.
    embedded.clear()
    mining = {
        "teacher": "small",
        "num_negatives": 3,
        "rule": {"kind": "top_k_perc_pos", "max_relative_score": 0.5},
    }
    other = make_run(root, data__datasets__0__mining=mining)
    assert prepare(other, at(storage, counts)) != plans
    assert not embedded
    # Other content of a file is other data, under the same path.
    (root / "pairs.jsonl").write_text((root / "pairs.jsonl").read_text().replace("query 7", "Q7"))
    changed = prepare(run, at(storage, counts))
    assert changed["first"] != plans["first"]
    assert changed["second"] == plans["second"]


def test_seeds_share_what_they_do_not_decide(root: Path, tmp_path: Path) -> None:
    """And what they share is what each would have made by itself, byte for byte."""

    def made(storage: Path, seed: int) -> dict[str, dict[str, bytes]]:
        prepare(override(make_run(root), [f"seed={seed}"]), replace(at(storage), seed=seed))
        folders = [
            *(storage / "data" / "records").iterdir(),
            *(storage / "data" / "mined").iterdir(),
        ]
        return {
            f"{folder.parent.name}/{folder.name}": {
                path.name: path.read_bytes() for path in sorted((folder / "parts").iterdir())
            }
            for folder in folders
        }

    first, second = made(tmp_path / "a", 0), made(tmp_path / "b", 1)
    shared = first.keys() & second.keys()
    names = sorted(name.rpartition("-")[0] for name in shared)
    assert names == ["mined/text", "records/own", "records/text"]
    assert all(first[name] == second[name] for name in shared)
    own = [name.rpartition("-")[0] for name in first.keys() ^ second.keys()]
    assert own == ["records/topic"] * 2
    assert first.items() <= made(tmp_path / "a", 1).items()  # one storage, nothing made twice


def test_a_killed_preparation_goes_on_and_ends_the_same(root: Path, tmp_path: Path) -> None:
    run = make_run(root)
    whole = prepare(run, at(str(tmp_path / "whole")))
    storage = tmp_path / "killed"
    total = 0
    for allowed in range(1, 40):
        left = allowed

        def dies(task, units, needs):
            nonlocal left, total
            for unit in units:
                if left == 0:
                    raise KeyboardInterrupt
                left -= 1
                total += 1
                yield task(unit)

        try:
            plans = prepare(run, at(storage, dies))
        except KeyboardInterrupt:
            continue
        break
    assert allowed > 2
    for stage, folder in plans.items():
        ours, theirs = BatchPlan.open(folder), BatchPlan.open(whole[stage])
        assert ours.fingerprint == theirs.fingerprint
    assert not list(storage.glob("plans/*/working"))


def test_no_text_of_a_held_out_title_in_any_plan(root: Path, tmp_path: Path) -> None:
    plans = prepare(make_run(root), at(tmp_path / "out"))
    kept = {
        r.id
        for p in tmp_path.glob("out/data/records/text-*/parts/*.parquet")
        for r in read_records(str(p))
    }
    held = {i for i in range(60) if f"text/Thing {i:02d}" not in kept}
    assert len(held) == 10
    texts = [
        text
        for folder in plans.values()
        for step in range(BatchPlan.open(folder).num_steps)
        for r in BatchPlan.open(folder).read(step)
        for text in (r.query, *r.positives, *(n.text for n in r.negatives))
    ]
    marks = [f"number {i}." for i in held] + [f"called {i}$" for i in held]
    assert not [t for t in texts if any(mark in f"{t}$" for mark in marks)]
    marks = [f"number {i}." for i in range(60)]
    assert sum(any(mark in t for mark in marks) for t in texts) > 50, "the marks are in the texts"


def test_rejected_share_empty_and_contradicting_settings(root: Path, tmp_path: Path) -> None:
    storage = str(tmp_path / "out")
    with (root / "pairs.jsonl").open("a") as file:
        file.write('\n{"query": "no positive here"}\n' * 2)
    with pytest.raises(
        DataError, match=r"'own': 2 of 35 rows .*\(2 × no positive\).*\n.*no positive here"
    ):
        prepare(make_run(root), at(storage))
    lenient = {"kind": "pairs", "path": "pairs.jsonl", "max_rejected_share": 0.1}
    prepare(make_run(root, data__datasets__2__source=lenient), at(storage))
    (root / "pairs.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"'own' is empty: .* has 0 rows"):
        prepare(make_run(root), at(storage))
    with pytest.raises(ConfigError, match=r"num_negatives 5 .*'text' mines only 3"):
        prepare(make_run(root, stages__1__batch__num_negatives=5), at(storage))


def test_more_than_a_batch_must_be_there(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="80 rows in all, fewer than one global batch of 400"):
        prepare(
            make_run(root, stages__0__batch__global_pairs=400),
            at(tmp_path / "out"),
        )
    few = make_run(root, data__datasets__2__num_samples=3)
    with pytest.raises(
        DataError, match="'own' has 3 rows, but each batch of 8 pairs takes up to 4"
    ):
        prepare(few, at(tmp_path / "out"))
