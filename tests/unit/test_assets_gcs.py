"""Google's storage where it does not answer: an error of ours, within the time that is stated."""

import socket
import time
from dataclasses import replace

import pytest

from rayembed.assets import clients
from rayembed.assets.storage import exists, list_files, read_bytes, remove_file, write_atomic
from rayembed.errors import StorageError


def write(place):
    write_atomic(place, b"content")


def list_folder(place):
    list_files(place, recursive=False)


CALLS = [read_bytes, exists, list_folder, write, remove_file]


def place_at(port):
    return f"gs://anonymous@bucket/f?scheme=http&endpoint_override=127.0.0.1:{port}"


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_is_not_there_is_a_storage_error_in_time(monkeypatch, call):
    monkeypatch.setattr(clients, "PATIENCE", replace(clients.PATIENCE, gcs_seconds=1))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(StorageError, match="does not answer"):
        call(place_at(port))
    assert time.monotonic() - began < 20


@pytest.mark.slow("two minutes of waiting; that of a server which is not there runs in CI")
@pytest.mark.parametrize("call", [read_bytes, exists, write])
def test_a_server_that_never_answers_is_a_storage_error_in_time(call):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(StorageError, match="does not answer"):
            call(place_at(silent.getsockname()[1]))
    assert time.monotonic() - began < 200
