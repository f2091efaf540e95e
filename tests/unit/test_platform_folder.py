"""The source root is called `platform`, like a module of the standard library."""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import prepared

import rayembed

ROOT = Path(__file__).resolve().parents[2]


def test_the_code_under_test_is_that_of_the_checkout():
    """In a copy of it too, where another one is installed."""
    assert Path(rayembed.__file__).resolve().parents[2] == ROOT


def test_a_checkout_below_a_path_with_a_space_has_workers_of_tests(monkeypatch):
    """pytest-xdist splits the command of a worker as a shell does."""
    monkeypatch.setattr(prepared, "prepare", lambda: None)
    monkeypatch.setattr(prepared, "__file__", "/my files/prepared.py")
    command = [sys.executable, "/my files/prepared.py", "run"]
    assert shlex.split(prepared.python_of_a_fork()) == command


def test_the_source_root_is_no_package():
    assert not (ROOT / "platform" / "__init__.py").exists()


def _imported(cwd, path):
    done = subprocess.run(
        [sys.executable, "-c", "import platform; print(platform.__file__, platform.system())"],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_the_standard_library_wins():
    expected = f"{sysconfig.get_path('stdlib')}/platform.py "
    for path in (f"{ROOT}", f"{ROOT}:{ROOT / 'platform'}", "."):
        assert _imported(ROOT, path).startswith(expected)


def test_with_an_init_file_it_would_not(tmp_path):
    (tmp_path / "platform").mkdir()
    (tmp_path / "platform" / "__init__.py").touch()
    assert "AttributeError" in _imported(tmp_path, str(tmp_path))
