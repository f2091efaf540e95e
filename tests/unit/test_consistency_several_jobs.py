"""Several jobs that make the same folder of filtered rows, and folders that are made anew."""

from collections.abc import Callable
from pathlib import Path

import pytest
from several_jobs import (
    CHECKS,
    at,
    before,
    check_vectors_that_were_removed_are_made_again,
    dataset,
)

from rayembed.data.engine.artifacts import DatasetArtifact
from rayembed.data.engine.work_items import Execute
from rayembed_extras.consistency.filter import make_filtered


def filtered(storage: Path, execute: Execute) -> DatasetArtifact:
    config = dataset(consistency={"teacher": "t", "top_k": 4, "shard_rows": 15})
    return make_filtered(at(storage, execute), config, before(storage))


@pytest.mark.parametrize("check", [*CHECKS, check_vectors_that_were_removed_are_made_again])
def test_what_holds_for_every_step(check: Callable[..., None], tmp_path: Path) -> None:
    check(filtered, tmp_path)
