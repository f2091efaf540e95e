"""`--help`, `--list` and `--dry-run` of every script in jobs/ start nothing and write nothing."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WATCHED = ROOT / "tests" / "support" / "watched_scripts.py"
SCRIPTS = sorted(
    path.relative_to(ROOT / "jobs").with_suffix("").as_posix()
    for path in (ROOT / "jobs").rglob("*.py")
)

DRY_RUNS = {
    **{name: [[]] for name in SCRIPTS if name.startswith("train_")},
    "adapt_encoder": [[]],
    "adapt_to_corpus": [[]],
    "clean_runs": [[], ["--free", "states", "--free", "data", "--free", "temporary"]],
    "cluster_pairs": [["--recipe", "cde-quickstart"]],
    "evaluate_model": [["--model", "bm25", "--tasks", "NFCorpus"]],
    "filter_pairs": [["--set", "data.datasets.pairs.consistency.teacher=hf://owner/model"]],
    "make_sizes": [[]],
    "mine_negatives": [["--recipe", "nvembed-quickstart"]],
    "prepare_pairs": [[]],
    "repair_labels": [
        [
            "--set=data.datasets.pairs.mining.teacher=hf://owner/model",
            "--set=data.datasets.pairs.repair.judge={kind: cross_encoder, model: hf://owner/rank}",
        ]
    ],
    "run_quickstart": [[], ["causal2vec"], ["cde"], ["nomic"]],
    "sweep_recipe": [["--set", "seed=grid(1, 2)"]],
    "synthesize_pairs": [[]],
    "papers/evaluate_backbone": [["--backbone", "x", "--tasks", "RTE"]],
    "papers/sweep_tables": [["--sweep", "nvembed-table2-quickstart"]],
}
"""Arguments beside `--dry-run`. A dry run of register_model needs a registry, and its own tests
compare that before and after."""

LISTS = {*DRY_RUNS, "compress_model", "papers/compare_with_papers"} - {
    "synthesize_pairs",
    "clean_runs",
}


def commands_of(script):
    lists = [["--list"]] if script in LISTS else []
    return [*lists, *([*argv, "--dry-run"] for argv in DRY_RUNS.get(script, []))]


def watch(folder, asked):
    """What `--help` and each command did; they ran in an empty folder, which stays empty."""
    home, caches = folder / "home", folder / "caches"
    home.mkdir()
    environment = {
        **os.environ,
        "HOME": str(home),
        "RAYEMBED_CACHE": str(home / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        # Folders that mteb and torch make when they are imported.
        "MTEB_CACHE": str(caches / "mteb"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "torch"),
    }
    done = subprocess.run(
        [sys.executable, str(WATCHED)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        cwd=home,
        env=environment,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert list(home.iterdir()) == []
    told = json.loads(done.stdout)
    for report in itertools.chain.from_iterable(told.values()):
        report["found"] = [event for event in report["found"] if str(caches) not in event]
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    asked = {str(ROOT / "jobs" / f"{script}.py"): commands_of(script) for script in SCRIPTS}
    return watch(tmp_path_factory.mktemp("scripts"), asked)


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_only_printed_starts_and_writes_nothing(told, script):
    reports = told[str(ROOT / "jobs" / f"{script}.py")]
    assert reports[0]["heavy"] == [], "--help is told at once"
    for argv, report in zip([["--help"], *commands_of(script)], reports, strict=True):
        assert (report["code"], report["found"]) == (0, []), (argv, report["err"])
        assert report["out"].strip(), argv
        # What prompts an evaluation uses is told by the code that scores on Ray.
        assert "ray" not in report["heavy"] or script == "evaluate_model", argv


SHELL = """
import subprocess, sys
from pathlib import Path
from rayembed.pipeline.job import Job
{line}
def listed(_):
    {does}
sys.exit(Job(read=lambda args: args, run=lambda *_: 0, lists=("x", listed))(sys.argv[1:]))
"""


CAUGHT = [
    ("", "subprocess.run(['true'])", "subprocess.Popen true"),
    ("", "Path('/dev/full').open('w')", "open /dev/full"),
    ("", "Path('/proc').mkdir(exist_ok=True)", "os.mkdir /proc"),
    ("import ray", "pass", "ray"),
]
"""Line of a script, what its list does, and what is told of that."""


def test_a_job_that_would_do_so_is_caught(tmp_path):
    """The control."""
    seen_of = {}
    for number, (line, does, seen) in enumerate(CAUGHT):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "ray.py").write_text("")
        (folder / "starts.py").write_text(SHELL.format(line=line, does=does))
        seen_of[str(folder / "starts.py")] = seen
    told = watch(tmp_path, {script: [["--list"]] for script in seen_of})
    for script, seen in seen_of.items():
        reports = told[script]
        assert [report["code"] for report in reports] == [0, 0]
        assert seen in [*reports[1]["found"], *reports[0]["heavy"]]
        assert reports[0]["found"] == []
