"""Stored vectors of a stage's teachers: what is embedded, what is reused, what a step reads."""

import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3_server import BUCKET, s3_server
from toy_model import ToyTokenizer

from rayembed.assets.storage import list_files, write_atomic
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.work_items import in_process
from rayembed.data.hashes import text_hash
from rayembed.data.plan.audit import teacher_provenance
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.stream import PairSteps
from rayembed.data.prepare import prepare
from rayembed.data.vectors.lookup import TeacherVectorLookup, TextIndex
from rayembed.data.vectors.teacher import TeacherLoader
from rayembed.errors import ArtifactError, AssetError, DataError

TEXTS = 40
embedded: Counter[tuple[str, str, str]] = Counter()


def vector(teacher: str, text: str, role: str) -> np.ndarray:
    """Texts of one number are alike, so that mining finds some; each text has its own vector."""
    number = int("".join(c for c in text if c.isdigit()) or 0)
    drawn = np.random.default_rng([len(teacher), number]).standard_normal(6)
    own = np.random.default_rng([text_hash(role + text) % 2**63]).standard_normal(6)
    made = drawn + 0.3 * own
    return made / np.linalg.norm(made)


def load(config: Any, weights: str, device: str):
    def encode(texts, role):
        embedded.update((config.teacher, text, role) for text in texts)
        return np.array([vector(config.teacher, t, role) for t in texts], dtype=np.float32)

    return encode


@pytest.fixture(autouse=True)
def count() -> None:
    embedded.clear()


def context(storage: object, execute=in_process) -> PipelineContext:
    loader = TeacherLoader(load, lambda reference: f"weights of {reference}")
    return PipelineContext(str(storage), 0, execute, loader)


def rows() -> list[dict[str, Any]]:
    return [
        {
            "query": f"ask {i}",
            "positive": f"answer {i} of this kind",
            "negatives": [f"wrong {i}", f"wrong {(i + 1) % TEXTS}"],
        }
        for i in range(TEXTS)
    ]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    documents = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(TEXTS))
    (tmp_path / "documents.jsonl").write_text(documents)
    return {"kind": "pairs", "path": str(tmp_path / "pairs.jsonl")}


SMALL = {"teacher": "small"}


def run_of(dataset: dict[str, Any], *teachers: dict[str, Any], **batch: Any) -> Run:
    stage = {
        "name": "first",
        "datasets": {"own": 1},
        "batch": {"global_pairs": 8, "num_negatives": 2, "in_batch_negatives": True} | batch,
        "optimizer": {"learning_rate": 1e-3},
        "steps": 6,
        "loss": {"kind": "similarity_distillation"},
        "teachers": list(teachers),
    }
    model = {"kind": "biencoder", "backbone": {"path": "none"}, "pooling": {"kind": "mean"}}
    data = {"datasets": [{"name": "own", **dataset}]}
    return parse(
        Run,
        {
            "name": "test",
            "model": model,
            "data": data,
            "stages": [stage],
            "evaluation": {"benchmarks": []},
        },
    )


def check(plan: BatchPlan, *teachers: str) -> set[str]:
    """Compare every vector of every step with the teacher's own; the documents that were read."""
    documents = set()
    for step in range(plan.num_steps):
        records = plan.read(step)
        batch = PairSteps(plan, ToyTokenizer())(step)
        assert len(batch.teacher_vectors) == len(teachers)
        for i, record in enumerate(records):
            own = [(record.query, "query", batch.query[i])]
            own.append((record.positives[0], "document", batch.positive[i]))
            negatives = zip(record.negatives, batch.negatives[i], strict=False)
            own += [(n.text, "document", place) for n, place in negatives]
            documents |= {text for text, role, _ in own if role == "document"}
            for teacher, found in zip(teachers, batch.teacher_vectors, strict=True):
                assert found.dtype == np.float16
                for text, role, place in own:
                    wanted = vector(teacher, text, role).astype(np.float16)
                    assert np.array_equal(found[place], wanted), (text, role)
    return documents


def store_of(plan: BatchPlan) -> dict[str, Any]:
    return dict(TeacherVectorLookup.open(plan.teachers[0]).manifest)


def test_a_teacher_that_mined_and_clustered_costs_nothing_more(files, tmp_path) -> None:
    corpus = {"path": str(tmp_path / "documents.jsonl")}
    dataset = {
        "source": files,
        "mining": SMALL | {"num_negatives": 2, "corpus": corpus},
        "clusters": SMALL | {"batch_pairs": 8, "iterations": 3, "restarts": 1},
    }
    out = tmp_path / "out"
    plan = prepare(run_of(dataset, SMALL, policy="clustered"), context(out))["first"]
    before = Counter(embedded)
    documents = check(BatchPlan.open(plan), "small")
    assert any(text.startswith("document") for text in documents), "negatives of the corpus"
    told = store_of(BatchPlan.open(plan))
    assert told["further"]["query"] == 0
    assert told["further"]["document"] >= sum(text.startswith("document") for text in documents)
    assert told["texts"]["query"] == TEXTS
    (found,) = teacher_provenance(plan)
    assert found["inputs"]["weights"] == "weights of small"
    assert found["width"] == 6
    embedded.clear()
    assert prepare(run_of(dataset, SMALL, policy="clustered"), context(out))["first"] == plan
    assert not embedded, "a second run finds all of it"
    prepare(plain(dataset, policy="clustered"), context(tmp_path / "b"))
    assert embedded == before, "as many texts as a run without teachers embeds"


def plain(dataset: dict[str, Any], **changes: Any) -> Run:
    """The run whose loss reads no vectors."""
    values = run_of(dataset, SMALL, **changes).model_dump(mode="json")
    values["stages"][0] |= {"teachers": [], "loss": {"kind": "infonce"}}
    return parse(Run, values)


def test_negatives_of_rows_are_copied_where_mining_embedded_them(files, tmp_path) -> None:
    source = files | {"negatives": "negatives"}
    mining = SMALL | {"num_negatives": 2, "pool": "given"}
    dataset = {"source": source, "mining": mining}
    plan = prepare(run_of(dataset, SMALL), context(tmp_path / "mined"))["first"]
    before = Counter(embedded)
    documents = check(BatchPlan.open(plan), "small")
    assert any(text.startswith("wrong") for text in documents)
    assert store_of(BatchPlan.open(plan))["further"]["document"] > 0
    embedded.clear()
    prepare(plain(dataset), context(tmp_path / "plain"))
    assert embedded == before, "nothing beside what mining embeds"
    assert max(embedded[one] for one in embedded if one[1].startswith("wrong")) == 1


def test_without_mining_every_text_is_embedded_once(files, tmp_path) -> None:
    dataset = {"source": files | {"negatives": "negatives"}}
    large = {"teacher": "larger", "query_prefix": "ask: "}
    plan = BatchPlan.open(
        prepare(run_of(dataset, SMALL, large), context(tmp_path / "out"))["first"]
    )
    check(plan, "small", "larger")
    assert set(embedded.values()) == {1}
    assert len(embedded) == 2 * 3 * TEXTS
    assert [TeacherVectorLookup.open(folder).width for folder in plan.teachers] == [6, 6]
    # Of fewer negatives fewer texts are needed, and what was embedded serves.
    embedded.clear()
    fewer = prepare(run_of(dataset, SMALL, num_negatives=1), context(tmp_path / "out"))["first"]
    check(BatchPlan.open(fewer), "small")
    assert not embedded


@pytest.mark.parametrize("after", [0, 1])
def test_a_killed_job_goes_on_with_what_it_has(files, tmp_path, monkeypatch, after) -> None:
    dataset = {"source": files | {"negatives": "negatives"}}
    out = tmp_path / "out"
    left = after

    def dies(task, items, needs="cpu"):
        nonlocal left
        for item in items:
            if needs == "gpu or machine":
                if not left:
                    raise KeyboardInterrupt
                left -= 1
            yield task(item)

    with pytest.raises(KeyboardInterrupt):
        prepare(run_of(dataset, SMALL), context(out, dies))
    plan = prepare(run_of(dataset, SMALL), context(out))["first"]
    check(BatchPlan.open(plan), "small")
    assert set(embedded.values()) == {1}


@pytest.mark.parametrize("mining", [None, SMALL | {"num_negatives": 2, "pool": "given"}])
def test_a_job_killed_behind_its_vectors_leaves_the_manifest_of_one_in_peace(
    files, tmp_path, mining
) -> None:
    run = run_of({"source": files | {"negatives": "negatives"}, "mining": mining}, SMALL)

    def dies(task, items, needs="cpu"):
        for result in in_process(task, items, needs):
            if list((tmp_path / "killed/data/vectors").glob("*/*.further-*")):
                for path in (tmp_path / "killed/data/teacher_vectors").glob("*/working/units/*"):
                    path.unlink()
                raise KeyboardInterrupt
            yield result

    with pytest.raises(KeyboardInterrupt):
        prepare(run, context(tmp_path / "killed", dies))
    told = []
    for place in ("killed", "peace"):
        plan = prepare(run, context(tmp_path / place))["first"]
        told.append({**store_of(BatchPlan.open(plan)), "seconds": 0, "digest": ""})
    assert told[0] == told[1]
    assert told[0]["further"]["document"] > 0


@pytest.mark.parametrize("gone", ["*", "*/*.queries.npy", "*/*.further-*"])
def test_vectors_that_were_removed_are_made_anew(files, tmp_path, gone) -> None:
    run = run_of({"source": files | {"negatives": "negatives"}}, SMALL)
    plan = prepare(run, context(tmp_path / "out"))["first"]
    embedded.clear()
    for path in (tmp_path / "out/data/vectors").glob(gone):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    assert prepare(run, context(tmp_path / "out"))["first"] == plan
    assert embedded
    check(BatchPlan.open(plan), "small")


def test_other_weights_of_the_teacher_are_another_plan(files, tmp_path, monkeypatch) -> None:
    run = run_of({"source": files}, SMALL, num_negatives=0)
    first = BatchPlan.open(prepare(run, context(tmp_path / "out"))["first"])
    other = TeacherLoader(load, lambda reference: "new weights")
    second = prepare(run, dataclasses.replace(context(tmp_path / "out"), teacher_loader=other))
    found = BatchPlan.open(second["first"])
    assert found.fingerprint != first.fingerprint, "so no checkpoint of the one serves the other"
    assert [r.id for r in found.read(3)] == [r.id for r in first.read(3)]
    embedded.clear()
    for module in ("store", "teacher"):
        monkeypatch.setattr(f"rayembed.data.vectors.{module}.VECTORS", "raised")
    third = prepare(run, context(tmp_path / "out"))
    assert BatchPlan.open(third["first"]).fingerprint not in {first.fingerprint, found.fingerprint}
    assert embedded


def test_what_is_missing_or_broken_is_told(files, tmp_path) -> None:
    run = run_of({"source": files}, SMALL, num_negatives=0)
    plan = BatchPlan.open(prepare(run, context(tmp_path / "out"))["first"])
    store = TeacherVectorLookup.open(plan.teachers[0])
    with pytest.raises(
        DataError, match=r"lack 1 of the 1 query texts of a step.*Remove that folder"
    ):
        store([("query", text_hash("never seen"))])
    path = next((tmp_path / "out/data/vectors").glob("*/*.queries.npy"))
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"queries.npy' is broken: the checksum does not match"):
        TeacherVectorLookup.open(plan.teachers[0])([("query", text_hash("ask 3"))])
    path.unlink()
    with pytest.raises(ArtifactError, match=r"queries.npy' is missing. Remove"):
        PairSteps(plan, ToyTokenizer())(0)


@pytest.mark.allow_hosts(["127.0.0.1", "::1", "localhost"])
def test_vectors_in_object_storage_are_copied_once(files, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        dataset = {"source": files | {"negatives": "negatives"}}
        made = prepare(run_of(dataset, SMALL), context(f"s3://{BUCKET}/out"))["first"]
        plan = BatchPlan.open(made)
        store = TeacherVectorLookup.open(plan.teachers[0])
        with monkeypatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 10}))
            with pytest.raises(
                AssetError, match=r"need [\d,]+ bytes in the cache .* only 10 bytes are free"
            ):
                store.fetch()
        store.fetch()
        copied = list_files(str(tmp_path / "cache/teacher_vectors"), recursive=True)
        assert sum(name.endswith(".npy") for name in copied) > 6
        check(plan, "small")
        path = next(p for p in store.manifest["files"]["query"])[0]
        write_atomic(f"s3://{BUCKET}/out/data/{path}", b"changed")
        check(plan, "small")
        monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "another machine"))
        with pytest.raises(ArtifactError, match=r"queries.npy' is broken"):
            TeacherVectorLookup.open(plan.teachers[0]).fetch()


def test_the_first_place_of_a_text_counts() -> None:
    index = TextIndex.of(
        [(0, np.array([7, 3])), (1, np.array([], dtype=np.int64)), (2, np.array([3, 9]))]
    )
    places, there = index.find(np.array([9, 3, 4, 7]))
    assert there.tolist() == [True, True, False, True]
    found = {(file, rows.tolist()[0]) for file, _, rows in index.by_file(places[there])}
    assert found == {(0, 1), (2, 1)}
    assert sorted(
        (file, row) for file, _, rows in index.by_file(places[there]) for row in rows.tolist()
    ) == [(0, 0), (0, 1), (2, 1)]
