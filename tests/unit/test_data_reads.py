"""How often rows are read and converted on their way from a file to a trained model."""

import json
from collections import Counter
from pathlib import Path

import pytest
from own_pairs import UNGUARDED, write_pairs
from tiny_models import save_encoder

import rayembed
from rayembed.data.sources import rows, versions
from rayembed.data.sources.pairs import PairsSource
from rayembed.pipeline.run.training_job import training_job

FAST = {
    **UNGUARDED,
    "model.query_max_length": 32,
    "model.document_max_length": 32,
    "model.backbone.dtype": "float32",
    "evaluation.baselines": [],
    "placement.runtime": "local",
}


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """Counts of readings of this test's rows, of those that reach the end, of hashes, and of
    conversions.
    """
    counts: Counter[str] = Counter()
    read, hashed, convert = rows._read_jsonl, versions.content_version, PairsSource.records

    def reading(filesystem, inside, *others):
        is_ours = inside == str(tmp_path / "pairs.jsonl")
        counts["opened"] += is_ours
        yield from read(filesystem, inside, *others)
        counts["read whole"] += is_ours

    def hashing(filesystem, inside):
        counts["hashed"] += inside.endswith("pairs.jsonl")
        return hashed(filesystem, inside)

    def converting(self, dataset, row):
        counts["converted"] += 1
        return convert(self, dataset, row)

    monkeypatch.setattr(rows, "_read_jsonl", reading)
    monkeypatch.setattr(versions, "content_version", hashing)
    monkeypatch.setattr(PairsSource, "records", converting)
    return counts


def write(path: Path, large: bool) -> int:
    rows = write_pairs(path)
    if large:
        rows = [
            {"query": f"number {i} of many", "positive": f"{i} cats and dogs", "more": "x" * 200}
            for i in range(21_000)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("way", ["api", "job"])
def test_rows_are_converted_once_beside_a_look_at_the_first(tmp_path, counted, way, large):
    path = tmp_path / "pairs.jsonl"
    save_encoder(tmp_path / "encoder")
    number = write(path, large)
    settings = {**FAST, "data.datasets.pairs.held_out.max_queries": 100} if large else FAST
    if way == "api":
        rayembed.train(
            tmp_path / "encoder",
            path,
            **({"steps": 2} if large else {"epochs": 1}),
            batch_size=16,
            output=tmp_path / "out",
            settings=settings,
        )
    else:
        settings = {
            **settings,
            "data.datasets.pairs.source.path": path,
            "model.backbone.path": tmp_path / "encoder",
            "stages.finetune.batch.global_pairs": 8,
            "stages.finetune.optimizer.warmup_steps": 1,
            "stages.finetune.steps": 2,
            "placement.storage_path": tmp_path / "out",
        }
        sets = []
        for name, value in settings.items():
            sets += ["--set", f"{name}={'null' if value is None else value}"]
        assert training_job("biencoder")(["--name", "own", *sets]) == 0
    looked_at = 1000 if large else number
    assert counted["converted"] == number + looked_at
    assert counted["hashed"] == 1
    # A small file is read whole by each look at its head too; a large one by its conversion alone.
    assert counted["read whole"] == (1 if large else 5 if way == "api" else 4)
    assert counted["opened"] == (8 if way == "api" else 7)
