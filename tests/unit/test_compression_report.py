"""What variants of a compressed model are measured with, and which is proposed for serving."""

from types import SimpleNamespace

import pytest
from tiny_folders import save_biencoder

from rayembed.config.settings import parse
from rayembed_extras.compression import compress as compress_module
from rayembed_extras.compression.compress import Ready, compress
from rayembed_extras.compression.contract import CalibrationText
from rayembed_extras.compression.measure import Measured
from rayembed_extras.compression.report import _best
from rayembed_extras.compression.run_settings import CompressionRun


def variant(size, mean=None, speed=None):
    measured = None if speed is None else Measured(speed, 0)
    made = SimpleNamespace(bytes_on_disk=size, measured=measured)
    return SimpleNamespace(made=made, mean=mean)


def test_the_fastest_is_proposed_among_those_that_lose_at_most_a_hundredth():
    slow, fast, bad = variant(90, 0.720, 10), variant(60, 0.715, 30), variant(20, 0.680, 99)
    assert _best([slow, fast, bad]) is fast
    assert _best([slow, bad]) is slow


def test_size_decides_where_speed_is_not_known():
    assert _best([variant(90, 0.720), variant(60, 0.715)]).made.bytes_on_disk == 60
    assert _best([variant(90), variant(60)]).made.bytes_on_disk == 60, "none is scored"


@pytest.mark.parametrize("documents", [["a", "b", "a"], []])
def test_documents_a_second_are_of_documents_where_there_are_any(documents, tmp_path, monkeypatch):
    seen = []

    def measured(folder, documents, **_):
        seen.append(documents)
        return Measured(1.0, 1)

    monkeypatch.setattr(compress_module, "measure", measured)
    folder = save_biencoder(tmp_path / "model")
    values = {
        "model": {"reference": str(folder)},
        "ways": [{"kind": "magnitude"}],
        "speed": {"rounds": 1},
        "placement": {"storage_path": str(tmp_path / "outputs")},
    }
    texts = [CalibrationText(text, "query") for text in ("q", "r")]
    texts += [CalibrationText(text, "document") for text in documents]
    compress(Ready(parse(CompressionRun, values), folder, texts))
    assert seen == 2 * [["a", "b"] if documents else ["q", "r"]]
