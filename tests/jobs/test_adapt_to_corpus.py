"""Documents without a label through the job: queries, mining, distillation, scores."""

import csv
from pathlib import Path

import pytest
from corpus_adaptation import adapt, arguments, manifest

pytestmark = pytest.mark.job


def test_a_corpus_becomes_a_scored_and_registered_model(tmp_path: Path) -> None:
    done = adapt(arguments(tmp_path, "mine"))
    assert done.returncode == 0, done.stderr[-4000:]
    records, mined = manifest(tmp_path, "records"), manifest(tmp_path, "mined")
    assert records["rejected"] == {"held out": 20}
    assert 0 < mined["rows_out"] <= records["rows_out"] == 180
    with (tmp_path / "outputs" / "runs" / "mine" / "scores.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["model", "corpus-held-out"]
    hybrid = ["hybrid: BM25 and untrained", "hybrid: BM25 and stage 1: adapt"]
    assert [name for name, _ in rows] == ["untrained", "stage 1: adapt", "BM25", *hybrid]
    for told in (
        "Held out   corpus-held-out: ",
        "Model ",
        "SentenceTransformer(",
        "Registry   mine",
    ):
        assert told in done.stdout
