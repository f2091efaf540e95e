"""An index whose driver is killed again and again equals one that nobody disturbed."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from made_up_index import build, documents, rows_of, settings, write
from tiny_folders import save_biencoder

from rayembed_extras.indexing.manifest import read_manifest
from rayembed_extras.indexing.outcome import Indexed

pytestmark = pytest.mark.slow("starts and kills six jobs; their boundaries have unit tests")

SCRIPT = """
import sys
from rayembed.jobs.table import JOBS
sys.exit(JOBS.get("index")(sys.argv[1:]))
"""


def command(folder, model, path):
    return [
        *(sys.executable, "-c", SCRIPT, "--documents", str(path), "--model", str(model)),
        *("--name", "docs", "--set", f"placement.storage_path={folder}"),
        *("--set", "placement.runtime=local", "--set", "rows_per_part=200"),
        *("--set", "documents.metadata=[year, lang]", "--set", "model.dtype=float32"),
    ]


def test_a_driver_killed_again_and_again_leaves_the_same_store(tmp_path):
    model = save_biencoder(tmp_path / "tiny")
    path = write(tmp_path / "docs.jsonl", documents(20_000))
    run = settings(tmp_path / "whole", model, path, rows_per_part=200)
    _, expected = build(run)
    folder, drawn, kills = tmp_path / "out", random.Random(0), 0
    environment = {**os.environ, "RAYEMBED_THREADS": "1"}
    done = folder / "indexes/docs/docs_1/ledger"
    while kills < 5:
        process = subprocess.Popen(
            command(folder, model, path), env=environment, stderr=subprocess.PIPE, text=True
        )
        # By the parts that are written, as starts differ by seconds.
        goal = (kills + 1) * 15 + drawn.randrange(10)
        while process.poll() is None and (
            not done.is_dir() or len(list(done.glob("*.parquet"))) < goal
        ):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
        manifest = read_manifest(str(folder), "docs")
        assert manifest.current is None
    last = subprocess.run(
        command(folder, model, path), env=environment, capture_output=True, text=True, check=False
    )
    assert last.returncode == 0, last.stderr[-4000:]
    manifest = read_manifest(str(folder), "docs")
    assert manifest.tables["docs_1"].counts["new"] == 20_000
    store = run.store.model_copy(update={"to": str(folder / "indexes/docs/store")})
    assert rows_of(Indexed("docs", manifest, str(folder), store)) == expected
