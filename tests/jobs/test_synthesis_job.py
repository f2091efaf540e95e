"""`jobs/synthesize_pairs.py` as a user runs it: dry, killed on the way, again, and its errors."""

import os
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from chat_server import ChatServer, Reply, chat_server
from forked_workers import script
from prepared import Forked
from tiny_job import run_here

import rayembed
from rayembed.data.engine.artifacts import open_artifact
from rayembed_extras.synthesis.job import run_synthesis_job
from rayembed_extras.synthesis.settings import SynthesisRun

pytestmark = pytest.mark.job

ROOT = Path(rayembed.__file__).parents[2]
SETTINGS = (
    "synthesis.examples={short-short: 500}",
    "synthesis.tasks_per_request=50",
    "synthesis.retries=1",
    "synthesis.llm.model=writer",
    "synthesis.llm.concurrency=4",
    "synthesis.llm.first_wait_seconds=0.01",
    "name=pairs",
)


def settings(server: ChatServer, storage: Path) -> list[str]:
    places = f"synthesis.llm.url={server.url}", f"placement.storage_path={storage}"
    return [f"--set={assignment}" for assignment in (*SETTINGS, *places)]


def start(server: ChatServer, storage: Path, log: Path) -> Forked:
    path = [str(ROOT / "platform"), str(ROOT / "tests" / "support")]
    with log.open("w") as file:
        return Forked(
            script("jobs/synthesize_pairs.py", *settings(server, storage)),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdout=file,
            stderr=file,
        )


def kept_ids(storage: Path) -> set[str]:
    files = storage.glob("data/answers/*/*/*.parquet")
    return {id for file in files for id in pq.read_table(file)["id"].to_pylist()}


def test_a_killed_job_goes_on_without_asking_again_what_was_kept(
    tmp_path: Path, tmp_path_factory
) -> None:
    def faulty(body, before):
        return Reply(503, "overloaded") if body["seed"] % 9 == 0 and not before else None

    with chat_server(reply=faulty, broken_share=0.1) as server:
        log = tmp_path_factory.mktemp("killed") / "log"
        killed = start(server, tmp_path, log)
        deadline = time.monotonic() + 300
        while len(kept_ids(tmp_path)) < 256 and time.monotonic() < deadline:
            assert killed.poll() is None, log.read_text()
            time.sleep(0.1)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        kept = kept_ids(tmp_path)
        assert len(kept) >= 256
        assert not list(tmp_path.rglob("manifest.json"))
        before = server.asked.copy()
        again = run_here("synthesize_pairs", *settings(server, tmp_path))
    printed, logged = again.stdout, again.stderr
    assert again.returncode == 0, logged
    asked_again = sum(server.asked[key] > before[key] > 0 for key in before)
    assert asked_again <= len(before) - len(kept)
    assert "answers/s" in logged
    folder = printed.partition("Records")[2].split()[0]
    prepared = open_artifact(folder)
    assert prepared.manifest["rows_in"] == 500
    assert prepared.manifest["rows_out"] >= 475
    assert "Next      rayembed prepare" in printed
    assert f"path: {folder}" in printed
    assert (Path(folder) / "audit.html").exists()
    assert kept <= kept_ids(tmp_path)


def test_a_dry_run_prints_a_recipe_that_is_read_back(tmp_path: Path, capsys) -> None:
    arguments = [f"--set={assignment}" for assignment in SETTINGS]
    assert run_synthesis_job([*arguments, "--dry-run"], about=None) == 0
    printed = capsys.readouterr()
    (tmp_path / "run.yaml").write_text(printed.out)
    run = SynthesisRun.read(tmp_path / "run.yaml")
    assert run.fingerprint in printed.out
    assert run.synthesis.examples == {"short-short": 500}
    assert "5 or more" in printed.err
    assert run_synthesis_job(["--recipe", f"{tmp_path}/run.yaml", "--dry-run"], about=None) == 0
    assert capsys.readouterr().out == printed.out
    assert list(tmp_path.iterdir()) == [tmp_path / "run.yaml"]


@pytest.mark.parametrize(
    ("assignment", "code", "message"),
    [
        ("synthesis.llm.modl=x", 2, "did you mean 'model'?"),
        ("synthesis.llm.api_key_env=sk-1234", 2, "name of an environment variable"),
        ("placement.storage_path=/proc/nothing", 1, "/proc/nothing"),
        ("synthesis.llm.api_key_env=NO_SUCH_KEY", 2, "NO_SUCH_KEY, which is not set"),
    ],
)
def test_errors_are_told_plainly(
    assignment: str, code: int, message: str, capsys, tmp_path, monkeypatch
) -> None:
    def ask(*_args, **_options) -> None:
        raise AssertionError("what is wrong is told before anything is asked")

    monkeypatch.setattr("rayembed_extras.synthesis.synthesize.make_synthetic", ask)
    storage = f"--set=placement.storage_path={tmp_path}"
    given = [] if "storage_path" in assignment else [storage]
    assert run_synthesis_job([*given, f"--set={assignment}"], about=None) == code
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert "sk-1234" not in printed.err
