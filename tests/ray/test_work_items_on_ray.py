"""What Ray Data may get wrong quietly does not touch units of work or the files that they write.

Remainders that are dropped, order, small inputs that are merged, writes that append: Ray 2.60 was
seen to do each of them by default.
"""

import dataclasses
import json
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray
from made_records import made_records

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext
from rayembed.data.engine.on_ray import execute_with_ray_data
from rayembed.data.engine.parts import read_records
from rayembed.data.engine.watch_on_ray import next_units
from rayembed.data.engine.work_items import run_resumable
from rayembed.data.sources import check, convert, files
from rayembed.data.sources.tasks import HeldOut

pytestmark = pytest.mark.ray

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclasses.dataclass(frozen=True)
class Number:
    value: int

    @property
    def key(self) -> str:
        return str(self.value)


@dataclasses.dataclass(frozen=True)
class Count:
    """Leaves a file for every call, whatever process it is in."""

    folder: str

    def __call__(self, unit: Number, device: str = "cpu") -> dict[str, Any]:
        if unit.value < 4:
            time.sleep(0.3)  # the first units finish last
        (Path(self.folder) / f"{unit.value}-{uuid.uuid4().hex}").touch()
        return {"rows_in": 1, "rows_out": 1, "rejected": {}, "value": unit.value}


def test_every_unit_once_in_order_and_none_dropped_or_merged(
    cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayembed.data.engine.watch_on_ray._TASKS_PER_CPU", 4)
    monkeypatch.setattr("rayembed.data.engine.watch_on_ray._TRIED_PER_CPU", 2)
    tasks: list[int] = []  # of each execution, and units of each task

    def cuts(*known: Any) -> tuple[int, int]:
        tasks.extend(found := next_units(*known))
        return found

    monkeypatch.setattr("rayembed.data.engine.on_ray.next_units", cuts)
    calls = tmp_path / "calls"
    calls.mkdir()
    units = [Number(i) for i in range(101)]  # no multiple of any number of workers
    task, folder = Count(str(calls)), str(tmp_path / "work")
    results = run_resumable(folder, "count", task, units, execute_with_ray_data)
    assert [result["value"] for result in results] == list(range(101))
    ran = Counter(int(path.name.partition("-")[0]) for path in calls.iterdir())
    assert ran == Counter(range(101)), "each unit is one call, however small"
    assert (tasks[1], sum(tasks[::2])) == (1, 101)
    assert len(tasks) == 4, "some are tried first, the rest share tasks"
    assert tasks[3] > 1
    again = run_resumable(folder, "count", task, units[:50], execute_with_ray_data)
    assert again == results[:50]
    assert len(list(calls.iterdir())) == 101, "a second run calls none"
    assert len(list((tmp_path / "work" / "units").iterdir())) == 101, "and writes none beside them"


def test_records_are_the_same_as_in_one_process_and_writing_twice_does_not_append(
    cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_BYTES_PER_PIECE", 2000)
    rows = [
        {"premise": f"premise {i % 60}", "hypothesis": f"h {i}", "label": i % 3 if i % 7 else 0}
        for i in range(400)
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "nli", "path": str(path)}
    here, alone = made_records(tmp_path / "here", source)
    assert len(files.list_pieces(str(path))) > 10

    dataset = parse(DatasetConfig, {"name": "own", "source": source})
    checked = check.check_source(dataset, "")
    pipeline_context = PipelineContext(str(tmp_path / "there"), 0, execute_with_ray_data)

    def there() -> DatasetArtifact:
        return convert.make_records(pipeline_context, checked, HeldOut())

    made = there()
    assert [r for part in made.parts for r in read_records(part.path)] == here
    assert [p.digest for p in made.parts] == [p.digest for p in alone.parts]
    folder = Path(made.folder)
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    (folder / "manifest.json").unlink()  # as if it had been killed at the end
    for kept in (folder / "units").iterdir():
        kept.unlink()
    assert there().parts == made.parts
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before
