"""Ray of a process: its token, its ports, proxies, and one message where it does not come up."""

import contextlib
import os
import socket

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
    monkeypatch.setattr(on_ray, "ensure_token", lambda: None)
    with contextlib.suppress(KeyError):
        monkeypatch.delenv("RAY_worker_niceness")
    with pytest.raises(PlacementError, match=told) as raised:
        on_ray.connect()
    assert "many lines more" not in str(raised.value)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_token_is_made_once_and_only_for_its_user(home):
    on_ray.ensure_token()
    file = home / ".ray" / "auth_token"
    token = file.read_text()
    assert len(token) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)  # as Ray itself writes it
    on_ray.ensure_token()
    assert file.read_text() == token
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["auth_token"]


def test_tokens_from_elsewhere(home, monkeypatch):
    other = home / "other"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
    with pytest.raises(PlacementError, match="does not exist"):
        on_ray.ensure_token()
    other.write_text("")
    with pytest.raises(PlacementError, match="is empty"):
        on_ray.ensure_token()
    other.write_text("abc\n")
    on_ray.ensure_token()
    other.unlink()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "def")
    on_ray.ensure_token()
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    on_ray.ensure_token()
    assert list(home.iterdir()) == []


def test_servers_of_this_machine_are_reached_without_a_proxy(monkeypatch):
    """Train asks the dashboard of its Ray through `requests`, which takes proxies for all else."""
    monkeypatch.setenv("NO_PROXY", "intranet")
    monkeypatch.setenv("no_proxy", "")
    on_ray.keep_loopback_from_proxies()
    on_ray.keep_loopback_from_proxies()
    assert os.environ["NO_PROXY"] == "intranet,127.0.0.1,localhost"
    assert os.environ["no_proxy"] == "127.0.0.1,localhost"
    monkeypatch.setenv("no_proxy", "*")
    on_ray.keep_loopback_from_proxies()
    assert os.environ["no_proxy"] == "*"


@pytest.mark.allow_hosts(["127.0.0.1", "::1", "localhost"])
def test_a_free_port_is_neither_taken_nor_one_that_connections_get(monkeypatch):
    assert 20_000 <= on_ray.free_port() < 32_000
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number = taken.getsockname()[1]
        ports = iter([[number, number, free := on_ray.free_port()], [number]])
        monkeypatch.setattr(on_ray.random.SystemRandom, "sample", lambda *_: next(ports))
        assert on_ray.free_port() == free
        with pytest.raises(PlacementError, match="no free port"):
            on_ray.free_port()
