"""A data job with every step that there is, which ends again and again at one of its writes."""

import random
from pathlib import Path
from typing import Any

import pytest
from chat_server import chat_server
from every_step import Writer, contents, everything, write_inputs

from rayembed.assets import storage as storage_module


class Ended(BaseException):
    """In place of a signal."""


@pytest.mark.slow("two whole data jobs, one of them in some forty starts")
@pytest.mark.parametrize("seed", [0, 3])
def test_a_job_that_ends_at_writes_leaves_the_files_of_one_in_peace(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    draw, write = random.Random(seed), storage_module._write
    ends, left = 0, 0

    def ends_here(path: Any, content: Any) -> None:
        nonlocal left
        left -= 1
        first = draw.random() < 0.5
        if left or not first:
            write(path, content)
        if not left:
            raise Ended

    with chat_server(reply=Writer()) as model:
        peace = everything(tmp_path, str(tmp_path / "peace"), model.url)
        monkeypatch.setattr(storage_module, "_write", ends_here)
        while True:
            left = draw.randint(3, 18)
            try:
                found = everything(tmp_path, str(tmp_path / "ended"), model.url)
                break
            except Ended:
                ends += 1
    assert ends > 15
    assert found == peace
    assert contents(tmp_path / "ended") == contents(tmp_path / "peace")
