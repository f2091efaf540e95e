"""`--help`, `--list` and `--dry-run` of every script in jobs/ start nothing and write nothing."""

import contextlib
import io
import itertools
import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from parts import FLATS

from rayembed.pipeline.job import Job

ROOT = Path(__file__).resolve().parents[2]
WATCHED = ROOT / "tests" / "support" / "watched_scripts.py"
SCRIPTS = sorted(
    path.relative_to(ROOT / "jobs").with_suffix("").as_posix()
    for path in (ROOT / "jobs").rglob("*.py")
)

MORE_DRY_RUNS = {
    "clean_runs": [["--free", "states", "--free", "data", "--free", "temporary"]],
}
READ_MORE = {"compress_model", "embed_corpus", "register_model", "upgrade_index"}
"""Jobs whose dry run reads a model or a registry, which their own tests make."""


def job_of(script):
    """The job that the script starts; None where its first argument chooses one."""
    with (
        patch.object(sys, "argv", [script]),
        patch.object(Job, "__call__", autospec=True, side_effect=_Called) as called,
        pytest.raises((_Called, SystemExit)),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        runpy.run_path(str(ROOT / "jobs" / f"{script}.py"), run_name="__main__")
    return called.call_args.args[0] if called.call_args else None


class _Called(Exception):
    pass


def commands_of(script):
    """What the script's job prints without work: its list, and dry runs of its example."""
    job = job_of(script)
    dry = job is not None and job.shows is not None and script not in READ_MORE
    runs = [shlex.split(job.example), *MORE_DRY_RUNS.get(script, [])] if dry else []
    lists = [["--list"]] if job is not None and job.lists is not None else []
    return [*lists, *([*argv, "--dry-run"] for argv in runs)]


def test_jobs_have_lists_and_dry_runs():
    """The control of what is derived from the jobs below."""
    commands = {script: commands_of(script) for script in SCRIPTS}
    if FLATS:
        assert sum(["--list"] in given for given in commands.values()) == 21
        assert sum(given[-1:] != [["--list"]] and given != [] for given in commands.values()) == 21
        assert commands["serve_model"] == []
    assert commands["register_model"] == []
    assert commands["mine_negatives"] == [
        ["--list"],
        ["--recipe", "nvembed-quickstart", "--dry-run"],
    ]


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
