"""Ray that does not come up is one message."""

import contextlib

import pytest

from rayembed.errors import PlacementError
from rayembed.pipeline.run import on_ray


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("local", r"^Ray does not start on this machine: no answer\. .*placement\.runtime=local"),
        (
            "10.0.0.1:6379",
            r"^there is no Ray cluster at RAY_ADDRESS=10\.0\.0\.1:6379: no answer\. ",
        ),
    ],
)
@pytest.mark.parametrize("error", [OSError, RuntimeError, TimeoutError, ValueError])
def test_ray_that_does_not_come_up_is_one_message(address, told, error, monkeypatch):
    def refused(**_):
        raise error("no answer\nand many lines more")

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("ray.init", refused)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(on_ray, "set_unset", lambda _: {})
    monkeypatch.setattr(on_ray, "work_begins", lambda: None)
    monkeypatch.setattr(on_ray, "_filter_lines_of_workers", lambda: None)
    monkeypatch.setattr(on_ray.local_head, "ensure_token", lambda: None)
    with contextlib.suppress(KeyError):
        monkeypatch.delenv("RAY_worker_niceness")
    with pytest.raises(PlacementError, match=told) as raised:
        on_ray.connect()
    assert "many lines more" not in str(raised.value)
