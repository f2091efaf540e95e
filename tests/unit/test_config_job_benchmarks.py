"""Benchmarks that bring their own jobs: by name, by entry points, and without their package."""

from importlib.metadata import EntryPoint

import pytest

from rayembed.config import named_benchmarks
from rayembed.config.named_benchmarks import job_benchmark, job_benchmark_names
from rayembed.errors import ConfigError


def test_a_benchmark_without_its_package_is_missed_only_where_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint("gone", "no_such_package.benchmark:GONE", "rayembed.job_benchmarks")
    monkeypatch.setattr(named_benchmarks, "_job_points", lambda: {"gone": point})
    assert job_benchmark_names() == ("gone",)
    with pytest.raises(ConfigError, match=r"'gone' to .*, but no_such_package\.benchmark:GONE can"):
        job_benchmark("gone")
