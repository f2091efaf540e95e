"""The filter's job from its command line to a finished folder, with a tiny teacher."""

from pathlib import Path

import pytest
from pairs_job import arguments, write_inputs
from tiny_job import run_here

from rayembed.data.engine.artifacts import open_artifact

pytestmark = [pytest.mark.job, pytest.mark.ray]


def test_the_job_ends_with_the_rows_that_a_teacher_finds(tmp_path: Path) -> None:
    asked = f"data.datasets.pairs.consistency={{teacher: {tmp_path / 'teacher'}, top_k: 60}}"
    done = run_here("filter_pairs", *arguments(write_inputs(tmp_path)), f"--set={asked}")
    assert done.returncode == 0, done.stderr[-4000:]
    made = [path.parent for path in tmp_path.glob("out/data/*/*/manifest.json")]
    folders = {path.parent.name: path for path in made}
    assert sorted(folders) == ["filtered", "records"]
    found = open_artifact(str(folders["filtered"])).manifest
    assert 0 < found["rows_out"] < found["rows_in"] == 100
    assert str(folders["filtered"]) in done.stdout
