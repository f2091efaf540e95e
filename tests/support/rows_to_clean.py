"""Rows of which some are copies, near-copies, or have texts of benchmarks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import read_records
from rayembed.data.engine.work_items import Execute, in_process
from rayembed.data.sources.check import check_source
from rayembed.data.sources.convert import make_records
from rayembed.data.sources.tasks import HeldOut

EVALUATION = [
    " ".join(f"{word}{i}" for word in ("which", "river", "flows", "through", "the", "old", "town"))
    for i in range(5)
]


def write_rows_to_clean(folder: Path) -> Path:
    """Forty rows of their own, copies, near-copies, and rows with evaluation texts."""
    folder.mkdir()
    rng = np.random.default_rng(0)

    def text(count: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(0, 2000, count))

    rows = [{"query": text(8), "positive": text(40)} for _ in range(40)]
    near = [
        {"query": row["query"], "positive": row["positive"].rsplit(" ", 1)[0]} for row in rows[:6]
    ]
    evaluated = [
        {"query": text.upper(), "positive": f"it is w{i}"} for i, text in enumerate(EVALUATION[:3])
    ]
    evaluated.append({"query": "which one", "positive": EVALUATION[3] + " today"})
    rows += [*rows[:4], *near, *evaluated]
    order = rng.permutation(len(rows))
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(rows[i]) for i in order))
    (folder / "evaluation.txt").write_text("\n".join(EVALUATION))
    return folder


def dataset(**changes: Any) -> DatasetConfig:
    values = {
        "name": "own",
        "source": {"kind": "pairs", "path": "pairs.jsonl"},
        "cleaning": {"overlap": {"tasks": ["evaluation.txt"]}},
    }
    return parse(DatasetConfig, values | changes)


def make(
    root: Path, storage: Path, config: DatasetConfig, execute: Execute = in_process
) -> DatasetArtifact:
    pipeline_context = PipelineContext(str(storage), 0, execute, root=str(root))
    return make_records(pipeline_context, check_source(config, str(root)), HeldOut())


def ids(prepared: DatasetArtifact) -> list[str]:
    return [record.id for part in prepared.parts for record in read_records(part.path)]


def check_parts_and_order(root: Path, storage: Path, config: DatasetConfig) -> None:
    """The outcome is the same in other parts and another order."""
    whole = make(root, storage / "a", config)
    lines = (root / "pairs.jsonl").read_text().splitlines()
    (root / "pairs.jsonl").write_text("\n".join(lines[::-1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayembed.data.engine.parts.ROWS_PER_PART", 7)
        cut = make(root, storage / "b", config)
    assert len(cut.parts) > len(whole.parts) == 1
    assert sorted(ids(cut)) == sorted(ids(whole))
    assert cut.manifest["dropped"] == whole.manifest["dropped"]


def check_killed(root: Path, storage: Path, config: DatasetConfig, least: int) -> None:
    """A killed cleaning goes on and ends the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayembed.data.engine.parts.ROWS_PER_PART", 20)
        whole = make(root, storage / "a", config)
        calls = 0

        def dies(task, units, needs):
            nonlocal calls
            for number, unit in enumerate(units):
                if number == 1:
                    raise KeyboardInterrupt
                calls += 1
                yield task(unit)

        for _ in range(60):
            try:
                found = make(root, storage / "b", config, dies)
            except KeyboardInterrupt:
                continue
            break
        assert calls > least
        assert found.manifest["parts"] == whole.manifest["parts"]
        assert found.manifest["dropped"] == whole.manifest["dropped"]
        calls = 0
        again = make(root, storage / "b", config, dies)
        assert (again.folder, again.manifest, again.reused) == (found.folder, found.manifest, True)
        assert calls == 0
