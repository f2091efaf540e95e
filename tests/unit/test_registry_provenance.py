import getpass
import hashlib
import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from rayembed.registry import provenance
from rayembed.registry.provenance import (
    code_version,
    collect_provenance,
    constraints_file,
    node_hardware,
)


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_what_is_collected_is_plain_and_names_nobody():
    found = collect_provenance(node_hardware())
    text = json.dumps(found)
    assert json.loads(text) == found
    assert found["packages"]["torch"].startswith("2.")
    assert found["hardware"]["cpu_cores"] >= 1
    assert found["hardware"]["memory_gib"] > 0
    assert socket.gethostname() not in text
    assert getpass.getuser() not in text
    assert str(Path.home()) not in text


def test_commit_and_changes(checkout):
    found = code_version(checkout)
    head = subprocess.check_output(["git", "-C", str(checkout), "rev-parse", "HEAD"], text=True)
    assert found["commit"] == head.strip()
    assert found["uncommitted_changes"] is False
    (checkout / "__init__.py").write_text("changed = 1\n")
    assert code_version(checkout)["uncommitted_changes"] is True


def test_code_that_git_does_not_know_has_no_commit(checkout, tmp_path, monkeypatch):
    """An installed package inside another project's checkout must not get that one's commit."""
    inner = checkout / "venv"
    inner.mkdir()
    (inner / "__init__.py").write_text("")
    assert code_version(inner)["commit"] is None
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert code_version(checkout)["commit"] is None
    assert code_version(tmp_path)["uncommitted_changes"] is None


@pytest.mark.parametrize("changed", [False, True])
def test_a_submitted_copy_knows_its_commit_from_the_command(
    checkout, tmp_path, monkeypatch, changed
):
    """It comes from `git describe`, as the README has it."""
    if changed:
        (checkout / "__init__.py").write_text("changed = 1\n")
    wanted = code_version(checkout)
    assert wanted["uncommitted_changes"] is changed
    describe = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude", "*"]
    git(checkout, "tag", "a-tag")
    by_hand = subprocess.check_output(describe, cwd=checkout, text=True).strip()
    copy = tmp_path / "copy"
    copy.mkdir()
    assert code_version(copy)["commit"] is None
    monkeypatch.setenv("RAYEMBED_COMMIT", by_hand)
    assert code_version(copy) == wanted


def test_constraints_are_named_by_their_content(tmp_path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "constraints.txt").write_text("torch==2.13.0\n")
    assert constraints_file(tmp_path) == {
        "path": "cluster/constraints.txt",
        "sha256": hashlib.sha256(b"torch==2.13.0\n").hexdigest(),
    }


def test_gpus_as_nvidia_smi_tells(monkeypatch):
    told = "NVIDIA H100, 81559 MiB, 550.1\nNVIDIA H100, 81559 MiB, 550.1"
    monkeypatch.setattr(provenance, "_output", lambda *command: told)
    assert provenance.gpus() == ["NVIDIA H100, 81559 MiB, 550.1"] * 2
    monkeypatch.setattr(provenance, "_output", lambda *command: None)
    assert provenance.gpus() == []
