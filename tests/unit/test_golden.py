"""Vectors and scores of tiny models stay what they were, or their number is raised."""

import json
import shutil

import pytest
import torch

import golden
from rayembed.models import pooling


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", golden.KINDS)
def test_vectors_and_scores_stay(kind, tmp_path):
    assert not golden.moved(kind, golden.golden(kind, tmp_path))


def test_every_file_is_of_a_kind():
    assert {path.stem for path in golden.FILES.iterdir()} == set(golden.KINDS)


def test_another_pooling_is_caught_and_written_only_under_a_raised_number(tmp_path, monkeypatch):
    files = tmp_path / "golden"
    shutil.copytree(golden.FILES, files)
    monkeypatch.setattr(golden, "FILES", files)
    before = (files / "biencoder.json").read_text()

    def without_first(hidden, mask, layout=None):
        """A mean that leaves the first dimension out."""
        found = real(hidden, mask, layout)
        return torch.cat([found[:, :1] * 0, found[:, 1:]], dim=1)

    real = pooling.masked_mean
    monkeypatch.setattr(pooling, "masked_mean", without_first)
    made = golden.golden("biencoder", tmp_path / "made")
    vectors, scores = golden.moved("biencoder", made)
    assert "vectors of biencoder moved. Unless this is a fault, raise VECTORS in" in vectors
    assert "`python tests/support/golden.py biencoder`" in vectors
    assert "raise SCORES" in scores
    with pytest.raises(SystemExit, match="raise VECTORS in"):
        golden.main("biencoder")
    assert (files / "biencoder.json").read_text() == before
    for number in ("VECTORS", "SCORES"):
        monkeypatch.setattr(golden, number, 2)
    assert "made with another number: make them with" in golden.moved("biencoder", made)[0]
    golden.main("biencoder")
    assert json.loads((files / "biencoder.json").read_text())["VECTORS"] == 2
    assert not golden.moved("biencoder", made)


def test_a_member_of_the_table_without_a_file_is_told_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "FILES", tmp_path)
    (told,) = golden.moved("cde", {})
    assert told == (
        "cde has no golden vectors and scores: make them with `python tests/support/golden.py cde`"
    )
