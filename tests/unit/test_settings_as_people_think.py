"""Epochs, warm-up by share, checkpoints by time, files as they come, what is told of settings."""

import csv
import io
import json
from pathlib import Path

import pytest
import torch
from own_pairs import own_run, write_pairs

from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.epochs import with_expected_steps, with_planned_steps
from rayembed.data.plan.audit import rejected_rows
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.prepare import prepare
from rayembed.data.sources.files import list_pieces
from rayembed.data.sources.rows import read_rows
from rayembed.errors import ArtifactError, ConfigError, DataError
from rayembed.pipeline.checks.files import look_at
from rayembed.pipeline.run.dry_run import print_dry_run
from rayembed.pipeline.run.training_job import training_job
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry.run_folder import check_run_folder, claim_run_folder
from rayembed.training import callbacks
from rayembed.training.callbacks import Preemption
from rayembed.training.optimizer import learning_rate_factor


def test_epochs_set_the_steps_of_the_rows_that_are_left(tmp_path):
    write_pairs(tmp_path / "pairs.jsonl", number=2000)
    rows = len((tmp_path / "pairs.jsonl").read_text().splitlines())
    source = f"data.datasets.pairs.source.path={tmp_path}/pairs.jsonl"
    run = override(get_recipe("biencoder"), [source, "stages.finetune.epochs=3"])
    expected = with_expected_steps(run)
    different = len({*(tmp_path / "pairs.jsonl").read_text().splitlines()})
    assert different < rows
    assert abs(expected.stages[0].steps - 3 * 0.9 * different / 64) <= 1
    assert (expected.stages[0].epochs, expected.stages[0].length) == (3, "3 epochs")
    assert with_expected_steps(expected) is expected
    assert expected.fingerprint == run.fingerprint, "an estimate is no part of the identity"
    whole = override(run, ["data.datasets.pairs.held_out=null", "evaluation.guard=null"])
    assert with_expected_steps(whole).stages[0].steps == round(3 * different / 64)
    assert whole.fingerprint != override(whole, ["stages.finetune.epochs=2"]).fingerprint


def test_a_length_replaces_that_of_the_recipe_and_two_of_one_command_are_refused():
    run = get_recipe("biencoder")
    assert run.stages[0].length == "1 epoch", "a job's default, as that of rayembed.train"
    fixed = override(run, ["stages.finetune.steps=300"])
    assert (fixed.stages[0].epochs, fixed.stages[0].length) == (None, "300 steps")
    assert override(fixed, ["stages.finetune.epochs=2"]).stages[0].length == "2 epochs"
    both = ["stages.finetune.steps=300", "stages.0.epochs=2"]
    for given in (both, both[::-1], ["stages.0.epochs=null", *both]):
        with pytest.raises(ConfigError) as error:
            override(run, given)
        assert "stages.finetune.steps=300 and stages.0.epochs=2 are both given" in str(error.value)
        assert "leave one of them out" in str(error.value)
    last = override(run, [*both[1:], "stages.finetune.epochs=null", both[0]])
    assert last.stages[0].length == "300 steps"
    plain = override(run, ["stages.finetune.epochs=null", "stages.finetune.steps=7"])
    assert plain.fingerprint == override(run, ["stages.finetune.steps=7"]).fingerprint


def test_epochs_of_files_elsewhere_are_counted_when_they_are_prepared():
    elsewhere = "hf://datasets/org/name@main/*.parquet"
    run = override(get_recipe("biencoder"), [f"data.datasets.pairs.source.path={elsewhere}"])
    assert run.stages[0].epochs == 1
    assert with_expected_steps(run) is run


SETTINGS_OF_EPOCHS = {
    "as it is": [],
    "num_samples": ["num_samples=60"],
    "sample_share": ["sample_share=0.1"],
    "both directions": ["source.both_directions=true"],
    "a share held out": ["held_out={kind: fraction, share: 0.2, max_queries: 20}"],
    "groups held out": ["held_out={kind: groups, column: group, share: 0.5}"],
    "values held out": ["held_out={kind: groups, column: group, values: [g1, g2]}"],
    "ids held out": [f"held_out={{kind: ids, column: id, values: {[str(i) for i in range(40)]}}}"],
    "sts": ["source={kind: sts, path: x, first: query, second: positive, score: score}"],
    "nli": ["source={kind: nli, path: x, premise: group, hypothesis: query, label: label}"],
}


@pytest.mark.parametrize(
    ("what", "epochs"), [*((what, 1) for what in SETTINGS_OF_EPOCHS), ("num_samples", 2.5)]
)
def test_an_epoch_is_every_record_that_is_left_once(tmp_path, what, epochs):
    rows = [
        {
            "id": str(i),
            "group": f"g{i % 8}" if what != "nli" else f"premise number {i // 3}",
            "query": f"query {i} of all",
            "positive": f"the document {i}",
            "score": i % 6,
            "label": "0" if i % 3 else "2",
        }
        for i in range(240)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = override(get_recipe("biencoder"), [
        f"data.datasets.pairs.source.path={tmp_path}/pairs.jsonl",
        "data.datasets.pairs.held_out=null",
        "evaluation.guard=null",
        "stages.finetune.batch.global_pairs=4",
        f"stages.finetune.epochs={epochs}",
        *(f"data.datasets.pairs.{setting}" for setting in SETTINGS_OF_EPOCHS[what]),
    ])  # fmt: skip
    run = override(run, [f"data.datasets.pairs.source.path={tmp_path}/pairs.jsonl"])
    plans = prepare(run, PipelineContext(str(tmp_path / "out"), run.seed))
    done = with_planned_steps(run, plans)
    plan = BatchPlan.open(plans["finetune"])
    drawn = [r.id for step in range(plan.num_steps) for r in plan.read(step)]
    records = plan.manifest["datasets"]["pairs"]["rows"]
    assert done.stages[0].steps == plan.num_steps == round(epochs * records / 4)
    assert abs(plan.manifest["datasets"]["pairs"]["epochs"] - epochs) < 4 / records
    if epochs == 1:
        assert len(set(drawn)) == len(drawn) > records - 4
    assert done.fingerprint == run.fingerprint
    expected = with_expected_steps(run).stages[0].steps
    if what != "nli":  # rows there make no records by themselves
        assert abs(expected - done.stages[0].steps) <= 0.1 * done.stages[0].steps + 1


def test_a_dry_run_counts_the_epochs(tmp_path, capsys):
    write_pairs(tmp_path / "pairs.jsonl", number=2000)
    words = [f"--set=data.datasets.pairs.source.path={tmp_path}/pairs.jsonl"]
    words += ["--set=stages.finetune.epochs=1", "--dry-run", "--recipe=biencoder"]
    asked, _ = training_job("biencoder").resolve(words)
    run = look_at(asked).run
    rows = len((tmp_path / "pairs.jsonl").read_text().splitlines())
    assert abs(run.stages[0].steps - 0.9 * rows / 64) < 0.1 * rows / 64


WARM = "stages.finetune.optimizer.warmup_steps=1500"
DECAY = "stages.finetune.optimizer.decay_steps=1500"
VALIDATED = (
    "evaluation.validation={data: {kind: held_out}, every_steps: 1200}",
    "evaluation.validation.keep=best",
)


@pytest.mark.parametrize(
    ("asked", "fits", "wrong", "told"),
    [
        ([WARM], 600, 20, "warmup_steps 1500 must be below the {steps} training steps"),
        (
            [DECAY],
            70,
            700,
            "decay_steps 1500 must be at least the number of training steps, {steps}",
        ),
        (VALIDATED, 400, 20, "every 1200 steps, but no stage has more steps"),
    ],
)
def test_what_depends_on_steps_is_judged_by_those_of_the_rows(tmp_path, asked, fits, wrong, told):
    """And not by the number that stands in the recipe, be it larger or smaller."""
    write_pairs(tmp_path / "pairs.jsonl")
    source = f"data.datasets.pairs.source.path={tmp_path}/pairs.jsonl"
    fitting, other, plain = (
        override(get_recipe("biencoder"), [source, *settings, f"stages.finetune.epochs={epochs}"])
        for settings, epochs in ((asked, fits), (asked, wrong), ([], wrong))
    )
    with_expected_steps(fitting)
    steps = with_expected_steps(plain).stages[0].steps
    with pytest.raises(ConfigError, match=told.format(steps=steps)):
        with_expected_steps(other)
    elsewhere = override(other, ["data.datasets.pairs.source.path=s3://bucket/pairs.jsonl"])
    assert with_expected_steps(elsewhere) is elsewhere, "nothing is known yet"
    plans = prepare(other, PipelineContext(str(tmp_path / "out"), other.seed))
    counted = BatchPlan.open(plans["finetune"]).num_steps
    with pytest.raises(ConfigError, match=told.format(steps=counted)):
        with_planned_steps(other, plans)


@pytest.mark.parametrize("steps", [1, 2, 47, 1000])
def test_the_warm_up_of_own_pairs_fits_any_length(steps):
    stage = override(get_recipe("biencoder"), [f"stages.finetune.steps={steps}"]).stages[0]
    assert stage.optimizer.warmup(steps) == min(round(0.1 * steps), steps - 1)
    assert learning_rate_factor(steps - 1, stage) > 0
    fixed = override(
        get_recipe("biencoder"),
        ["stages.finetune.optimizer.warmup_steps=7", "stages.finetune.steps=50"],
    )
    assert fixed.stages[0].optimizer.warmup(50) == 7


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


def test_a_checkpoint_is_due_by_time_and_every_one_starts_the_clock(monkeypatch, tmp_path):
    clock = Clock()
    monkeypatch.setattr(callbacks, "time", clock)
    kept = Preemption(lambda: False, every_minutes=5)
    never = Preemption(lambda: False)
    for each in (kept, never):
        each.on_train_start(type("T", (), {"device": torch.device("cpu")}), 0)
    due = []
    for minute in range(1, 14):
        clock.now = 60.0 * minute
        if kept.should_save(minute):
            due.append(minute)
            kept.on_checkpoint(minute, tmp_path)
        if minute == 7:  # one that steps ask for
            kept.on_checkpoint(minute, tmp_path)
        assert not never.should_save(minute)
    assert due == [5, 12]


@pytest.mark.parametrize(("seconds", "every"), [(0.1, 8), (0.6, 4), (2.0, 1), (30.0, 1)])
def test_workers_ask_for_an_announced_end_every_few_quick_steps(monkeypatch, seconds, every):
    """Each question is a message, for which a device's host waits."""
    clock, messages = Clock(), []
    monkeypatch.setattr(callbacks, "time", clock)

    def largest(value, device):
        messages.append(clock.now)
        return value

    monkeypatch.setattr(callbacks, "largest", largest)
    notice = Preemption(lambda: clock.now > 50 * seconds, look_seconds=5.0)
    notice.on_train_start(type("T", (), {"device": torch.device("cpu")}), 0)
    saved = []
    for step in range(1, 201):
        clock.now = seconds * step
        if notice.should_save(step):
            saved.append(step)
    assert len(saved) == 1
    assert 50 < saved[0] <= 50 + 5 / seconds + 2 * every
    assert len(messages) <= 200 / every + 200 * seconds / 5 + 2


def test_a_name_used_before_says_what_differs(tmp_path):
    steps = "stages.finetune.steps=1000"
    run = override(get_recipe("biencoder"), ["model.backbone.dtype=float32", steps])
    claim_run_folder(tmp_path, run)
    other = override(run, ["stages.finetune.steps=7", "seed=3"])
    with pytest.raises(ArtifactError) as told:
        check_run_folder(tmp_path, other)
    assert "seed is 0, here 3; stages.finetune.steps is 1000, here 7" in str(told.value)


def test_a_setting_that_is_given_twice_is_told(capsys):
    words = ["--recipe=biencoder", "--set=seed=1", "--set=seed=2"]
    run, _ = training_job("biencoder").resolve(words)
    assert run.seed == 2
    assert "--set seed is given several times; the last one counts" in capsys.readouterr().err


ROWS = [{"query": "número", "positive": "España"}, {"query": "été", "positive": "Côte"}]


def written(path, delimiter, encoding):
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.DictWriter(file, ["query", "positive"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-8"])
def test_csv_files_are_read_as_they_come(tmp_path, encoding):
    written(tmp_path / "a.csv", ";", encoding)
    (piece,) = list_pieces(str(tmp_path / "a.csv"), delimiter=";", encoding=encoding)
    assert [row.values for row in read_rows(piece)] == ROWS


def test_jsonl_in_latin_1_is_read_and_utf_16_is_refused(tmp_path):
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    (tmp_path / "a.jsonl").write_text(lines, encoding="latin-1")
    (piece,) = list_pieces(str(tmp_path / "a.jsonl"), encoding="latin-1")
    assert [row.values for row in read_rows(piece)] == ROWS
    with pytest.raises(DataError, match="iconv -f utf-16 -t utf-8"):
        list_pieces(str(tmp_path / "a.jsonl"), encoding="utf-16")
    with pytest.raises(DataError, match="Python knows no encoding 'latein'"):
        list_pieces(str(tmp_path / "a.jsonl"), encoding="latein")


def test_a_wrong_delimiter_or_encoding_says_what_to_set(tmp_path):
    written(tmp_path / "a.csv", ";", "utf-8")
    path = f"data.datasets.pairs.source.path={tmp_path}/a.csv"
    run = own_run(tmp_path, path)
    with pytest.raises(ConfigError, match=r"set data\.datasets\.pairs\.source\.delimiter=';'"):
        prepare(run, PipelineContext(str(tmp_path / "out"), 0))
    written(tmp_path / "a.csv", ";", "utf-16")
    with pytest.raises(ArtifactError, match="utf-16 for Excel's Unicode text"):
        prepare(run, PipelineContext(str(tmp_path / "out"), 0))


def test_dirt_of_own_pairs_is_trained_on_up_to_a_twentieth(tmp_path):
    rows = write_pairs(tmp_path / "pairs.jsonl")
    dirty = [{"query": "", "positive": "nothing"}] * 9 + [{"query": 7, "positive": "seven"}]
    text = "".join(json.dumps(row) + "\n" for row in [*dirty, *rows])
    (tmp_path / "pairs.jsonl").write_text(text)
    run = own_run(tmp_path, f"data.datasets.pairs.source.path={tmp_path}/dirty.jsonl")
    (tmp_path / "dirty.jsonl").write_text(text)
    (plan,) = prepare(run, PipelineContext(str(tmp_path / "out"), 0)).values()
    (line,) = rejected_rows(plan)
    total = len(rows) + len(dirty)
    assert line.startswith(f"pairs: 9 of {total} rows ({9 / total:.1%}): 9 × no query; examples: ")
    assert Path(line.rpartition("examples: ")[2]).read_text().count("no query")
    (tmp_path / "dirty.jsonl").write_text(text + '{"query": ""}\n' * 10)
    with pytest.raises(DataError, match=r"set data\.datasets\.pairs\.source\.max_rejected_share"):
        prepare(run, PipelineContext(str(tmp_path / "out"), 0))


def test_a_dry_run_says_what_is_an_estimate_and_a_run_of_many_passes_is_told(tmp_path, caplog):
    def shown(run):
        out, tables = io.StringIO(), io.StringIO()
        print_dry_run(run, look_at(run), out=out, tables=tables)
        return out.getvalue(), " ".join(tables.getvalue().split())

    run = with_expected_steps(own_run(tmp_path, "stages.finetune.epochs=2"))
    yaml, tables = shown(run)
    assert f"about {run.stages[0].steps} " in tables
    assert f"fingerprint {run.fingerprint}" in yaml
    again = with_expected_steps(Run.read(write(tmp_path / "again.yaml", yaml)))
    assert (again, shown(again)[0]) == (run, yaml), "what it prints is the same run again"
    plans = prepare(run, PipelineContext(str(tmp_path / "out"), run.seed))
    assert with_planned_steps(run, plans).to_yaml().replace("\n", " ").count("epochs: 2") == 1

    few = own_run(tmp_path, "stages.finetune.steps=400")
    (told,) = [line for line in look_at(few).warnings if "passes" in line]
    assert "stage finetune: 400 steps are about" in told
    assert "stages.finetune.epochs=1" in told
    prepare(few, PipelineContext(str(tmp_path / "out"), few.seed))
    assert "stage finetune: 400 steps are" in caplog.text
    for quiet in (own_run(tmp_path, "stages.finetune.steps=20"), run):
        assert not [line for line in look_at(quiet).warnings if "passes" in line]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
