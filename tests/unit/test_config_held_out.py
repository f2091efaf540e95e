"""Settings of held-out parts that do not hold are refused with what to set."""

from typing import Any

import pytest

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.errors import ConfigError

FRACTION = {"kind": "fraction", "share": 0.1}


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            {"source": {"kind": "classes", "path": "a"}},
            r"held_out does not support the source kind 'classes'",
        ),
        (
            {
                "source": {"kind": "records", "path": "a"},
                "held_out": {"kind": "ids", "column": "labels", "values": ["a"]},
            },
            r"records have no such column; did you mean 'label'",
        ),
        ({"held_out": {"kind": "groups", "column": "a"}}, r"set either held_out\.share"),
        (
            {"held_out": {"kind": "groups", "column": "a", "share": 0.5, "values": ["b"]}},
            r"set either held_out\.share",
        ),
        (
            {"held_out": {"kind": "ids", "column": "a"}},
            r"held_out\.values \(a\s+list of ids\) or held_out\.file",
        ),
        ({"held_out": {**FRACTION, "share": 1.0}}, r"share = 1.0: must be less than 1"),
        (
            {"held_out": {**FRACTION, "share": 1e-6, "max_queries": 1000}},
            r"hashes of 1,000,000,\d+ documents in memory, but at most 10,000,000",
        ),
        ({"held_out": {"kind": "groups", "columns": "a"}}, r"did you mean 'column'"),
    ],
)
def test_settings_that_do_not_hold(dataset: dict[str, Any], message: str) -> None:
    values = {"name": "own", "source": {"kind": "pairs", "path": "a"}, "held_out": FRACTION}
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        parse(DatasetConfig, values | dataset)
