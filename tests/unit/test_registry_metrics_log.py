import json
import pickle

import pytest
from small_room import room_for_files

from rayembed.errors import ArtifactError, StorageError
from rayembed.registry.metrics_log import LogReader, MetricsLog, dropped_steps
from rayembed.registry.mlflow_run import Outbox


def steps(records):
    return [(r["stage"], r["step"], r["global_step"], r["loss"]) for r in records]


def filled(path, last=4):
    log = MetricsLog(path)
    for step in range(1, last + 1):
        stage, within = ("first", step) if step <= 2 else ("second", step - 2)
        log.append(stage, within, step, {"loss": 1.0 / step, "grad_norm": 2.0}, seconds=float(step))
    return log


def test_each_step_is_one_line(tmp_path):
    log = filled(tmp_path / "new" / "metrics.jsonl")
    lines = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[2]) == {
        "stage": "second",
        "step": 1,
        "global_step": 3,
        "time": 3.0,
        "loss": 1 / 3,
        "grad_norm": 2.0,
    }
    assert len(lines) == 4
    assert log.last()["global_step"] == 4
    assert log.last("first")["global_step"] == 2
    assert log.last("third") is None


def test_log_without_file_is_empty(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert log.records() == []
    assert log.last() is None
    assert log.truncate(3) == 0


@pytest.mark.parametrize("fresh", [True, False])
def test_step_reported_again_replaces_it_and_what_followed(tmp_path, fresh):
    log = filled(tmp_path / "m")
    if fresh:  # as after a restart of the process
        log = MetricsLog(tmp_path / "m")
    log.append("second", 1, 3, {"loss": 9.0})
    expected = [("first", 1, 1, 1.0), ("first", 2, 2, 0.5), ("second", 1, 3, 9.0)]
    assert steps(log.records()) == expected
    log.append("second", 2, 4, {"loss": 8.0})
    assert steps(log.records()) == [*expected, ("second", 2, 4, 8.0)]


def test_truncate_keeps_the_step_it_resumes_from(tmp_path):
    log = filled(tmp_path / "m")
    assert log.truncate(2) == 2
    assert [r["global_step"] for r in log.records()] == [1, 2]
    assert log.truncate(2) == 0
    log.append("second", 1, 3, {"loss": 7.0})
    assert [r["global_step"] for r in MetricsLog(tmp_path / "m").records()] == [1, 2, 3]


def test_torn_last_line_is_no_record_and_is_removed_by_the_next_writer(tmp_path):
    path = tmp_path / "m"
    filled(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    log = MetricsLog(path)
    assert [r["global_step"] for r in log.records()] == [1, 2, 3]
    log.append("second", 2, 4, {"loss": 0.25, "grad_norm": 2.0}, seconds=4.0)
    assert path.read_bytes() == whole


def test_foreign_line_is_told_with_its_number(tmp_path):
    path = tmp_path / "m"
    filled(path)
    path.write_bytes(path.read_bytes() + b"hello\n")
    with pytest.raises(ArtifactError, match=r"line 5 of .* is not JSON: b'hello"):
        MetricsLog(path).records()


def test_unwritable_log_is_an_error_of_the_step(tmp_path):
    (tmp_path / "m").mkdir()
    log = MetricsLog(tmp_path / "m")
    log._last = 0  # the folder in the file's place is only seen when writing
    with pytest.raises(ArtifactError, match="metrics of step 1 cannot be written"):
        log.append("first", 1, 1, {"loss": 1.0})


def test_a_disk_that_is_full_leaves_no_part_of_a_line(tmp_path):
    log = filled(tmp_path / "m.jsonl")
    whole = log.path.read_bytes()
    with (
        room_for_files(len(whole) + 20),
        pytest.raises(ArtifactError, match="metrics of step 5 cannot be written"),
    ):
        log.append("second", 3, 5, {"loss": 0.2})
    assert log.path.read_bytes() == whole
    log.append("second", 3, 5, {"loss": 0.2})
    assert [record["global_step"] for record in log.records()] == [1, 2, 3, 4, 5]


def test_not_a_number_is_kept_in_json_that_any_tool_reads(tmp_path):
    log = MetricsLog(tmp_path / "m")
    log.append("first", 1, 1, {"loss": float("nan"), "grad_norm": float("inf")})
    log.append("first", 2, 2, {"loss": 1.0, "grad_norm": float("-inf")})
    log.append("first", 2, 2, {"loss": 1.0, "grad_norm": float("-inf")})  # written anew
    first, second = log.records()
    assert first["loss"] != first["loss"]
    assert first["grad_norm"] == float("inf")
    assert (second["loss"], second["grad_norm"]) == (1.0, float("-inf"))

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    for line in log.path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_dropped_steps_of_a_run_are_those_of_its_stages():
    records = [
        {"stage": stage, "dropped_steps": float(count)}
        for stage, counts in (("first", (0, 1, 1)), ("second", (0, 2)))
        for count in counts
    ]
    assert dropped_steps(records) == 3


def test_reader_takes_what_is_new_and_follows_a_replaced_file(tmp_path):
    path = tmp_path / "m"
    reader = LogReader(path)
    assert reader.read() == []
    log = filled(path, last=2)
    assert [r["global_step"] for r in reader.read()] == [1, 2]
    assert reader.read() == []
    with path.open("ab") as file:  # half a line is left for later
        file.write(b'{"global_step"')
        file.flush()
        assert reader.read() == []
        file.write(b": 3}\n")
    assert [r["global_step"] for r in reader.read()] == [3]
    log.truncate(1)
    assert [r["global_step"] for r in reader.read()] == [1]


def test_log_survives_pickling(tmp_path):
    log = filled(tmp_path / "m")
    again = pickle.loads(pickle.dumps(log))
    again.append("second", 3, 5, {"loss": 0.2})
    assert [r["global_step"] for r in again.records()] == [1, 2, 3, 4, 5]


def test_outbox_gives_each_entry_until_it_is_taken(tmp_path):
    path = tmp_path / "outbox.jsonl"
    box = Outbox(path)
    for name in "abc":
        box.put({"kind": name})
    box.taken()
    path.write_bytes(path.read_bytes() + b'{"kind": "to')  # a process killed while it wrote
    box = Outbox(path)
    assert [e["kind"] for e in box.waiting()] == ["b", "c"]
    box.put({"kind": "d"})
    box.taken()
    assert [e["kind"] for e in box.waiting()] == ["c", "d"]
    box.restart()
    assert [e["kind"] for e in box.waiting()] == ["a", "b", "c", "d"]


def test_outbox_on_a_full_disk_keeps_what_it_has(tmp_path):
    box = Outbox(tmp_path / "outbox.jsonl")
    box.put({"kind": "a"})
    whole = (tmp_path / "outbox.jsonl").stat().st_size
    with room_for_files(whole + 5), pytest.raises(ArtifactError, match="make room"):
        box.put({"kind": "b"})
    with room_for_files(0), pytest.raises(StorageError, match=rf"cannot write .{tmp_path}.*taken"):
        box.restart()
    box.put({"kind": "c"})
    assert [entry["kind"] for entry in box.waiting()] == ["a", "c"]
