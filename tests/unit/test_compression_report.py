"""Which variant of a compressed model is proposed for serving."""

from types import SimpleNamespace

from rayembed.compression.measure import Measured
from rayembed.pipeline.compression_report import _best


def variant(size, mean=None, speed=None):
    measured = None if speed is None else Measured(speed, 0)
    return SimpleNamespace(bytes_on_disk=size, mean=mean, measured=measured)


def test_the_fastest_is_proposed_among_those_that_lose_at_most_a_hundredth():
    slow, fast, bad = variant(90, 0.720, 10), variant(60, 0.715, 30), variant(20, 0.680, 99)
    assert _best([slow, fast, bad]) is fast
    assert _best([slow, bad]) is slow


def test_size_decides_where_speed_is_not_known():
    assert _best([variant(90, 0.720), variant(60, 0.715)]).bytes_on_disk == 60
    assert _best([variant(90), variant(60)]).bytes_on_disk == 60, "none is scored"
