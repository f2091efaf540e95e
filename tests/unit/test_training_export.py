"""An exported model is whole or made again, on disk and in object storage."""

import errno
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from made_up_articles import run_over
from s3_server import BUCKET, s3_server
from tiny_models import save_encoder

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import join, list_files, open_storage, read_bytes, write_atomic
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.errors import ArtifactError, StorageFullError
from rayembed.models.contract import trainable_state
from rayembed.models.loading.load import load_model
from rayembed.models.loading.saved_folder import saved_dimensions
from rayembed.models.passes.encoding import encode
from rayembed.proof.proof import has_proof, read_proof
from rayembed.training.checkpoints.export import MADE_OF_FILE, export, upload_model
from rayembed.training.checkpoints.weights import (
    load_weights,
    read_made_of,
    read_weights,
    weights_digest,
    write_weights,
)

TEXTS = ["one text", "another"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    values = run_over(folder / "none.json").model_dump(mode="json")
    values["model"]["backbone"] = {"path": str(save_encoder(folder / "base")), "dtype": "float32"}
    values["model"]["query_max_length"] = values["model"]["document_max_length"] = 16
    return parse(Run, values)


@pytest.fixture(params=["disk", "s3"])
def storage(request, tmp_path, monkeypatch):
    if request.param == "disk":
        yield str(tmp_path / "storage")
        return
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield f"s3://{BUCKET}/storage"


@pytest.fixture
def weights(run, storage):
    """Other weights than the untrained ones, in storage."""
    state = trainable_state(load_weights(run, None))
    place = join(storage, "weights.safetensors")
    write_weights(place, {k: v * 1.5 + 0.1 for k, v in state.items()}, {"run": "this"})
    return place


def embedded(folder, tmp_path):
    return encode(load_model(resolve_model(folder, cache=tmp_path / "cache")), TEXTS, role="query")


def written(path):
    filesystem, inside = open_storage(path)
    return filesystem.get_file_info(inside).mtime_ns


def test_exported_once_and_again_when_what_it_is_made_of_changes(run, storage, weights, tmp_path):
    folder = join(storage, "models", "one")
    export(run, None, folder)
    untrained = embedded(folder, tmp_path)
    settings = resolve_model(folder, cache=tmp_path / "cache") / "rayembed.json"
    assert saved_dimensions(settings) == load_model(settings.parent).dimensions
    before = written(join(folder, MADE_OF_FILE))
    export(run, None, folder)
    assert written(join(folder, MADE_OF_FILE)) == before
    # A file that the next export does not have must not stay.
    write_atomic(join(folder, "model-00002-of-00002.safetensors"), b"")
    export(run, weights, folder)
    assert "model-00002-of-00002.safetensors" not in list_files(folder, recursive=True)
    trained = embedded(folder, tmp_path)
    assert np.abs(trained - untrained).max() > 1e-3
    values = run.model_dump(mode="json")
    values["evaluation"]["instructions"] = {"WikiSentenceRetrieval": "Find it"}
    export(parse(Run, values), weights, folder)
    prompts = json.loads(read_bytes(join(folder, "config_sentence_transformers.json")))["prompts"]
    assert "WikiSentenceRetrieval" in prompts


def test_a_whole_model_gets_the_proof_that_it_lacks(run, storage, monkeypatch):
    """As one of an earlier version, though nothing is exported again."""
    folder = join(storage, "models", "one")
    with monkeypatch.context() as patch:
        patch.setattr("rayembed.training.checkpoints.export.add_proof", lambda place: None)
        export(run, None, folder)
    assert not has_proof(folder)
    monkeypatch.setattr("rayembed.training.checkpoints.export.load_weights", None)
    export(run, None, folder)
    assert has_proof(folder)
    assert read_proof(resolve_model(folder)) is not None
    write_atomic(join(folder, "proof", "proof.json"), b'{"format": 1}')  # of an earlier format
    export(run, None, folder)
    assert has_proof(folder)


@pytest.mark.parametrize("storage", ["s3"], indirect=True)  # on disk the folder is renamed
def test_an_upload_that_broke_off_is_not_taken_for_whole(run, storage, monkeypatch):
    folder = join(storage, "models", "one")
    export(run, None, folder)
    whole = list_files(folder, recursive=True)

    def half(source, path):
        write_atomic(join(path, "config.json"), (source / "config.json").read_bytes())
        raise OSError("connection lost")

    values = run.model_dump(mode="json")
    other = parse(Run, {**values, "seed": 1})
    with monkeypatch.context() as patch:
        patch.setattr("rayembed.training.checkpoints.export.upload_folder", half)
        with pytest.raises(OSError, match="connection lost"):
            export(other, None, folder)
    assert list_files(folder, recursive=True) == ["config.json"]
    export(run, None, folder)
    assert list_files(folder, recursive=True) == whole


def test_a_disk_that_fills_up_is_told_of_any_model(storage):
    """Also of encoders, which transformers and safetensors write into the folder."""
    folder = join(storage, "models", "one")

    def save(place):
        place.mkdir(parents=True)
        (place / "weights").write_bytes(b"part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    where = "export-.*or set TMPDIR" if "://" in storage else f"'{folder}'"
    with pytest.raises(StorageFullError, match=f"no room to write .*{where}"):
        upload_model(folder, b"made of", save, embeds=False)
    assert MADE_OF_FILE not in list_files(folder, recursive=True)
    whole = lambda place: write_atomic(place / "weights", b"whole")  # noqa: E731
    upload_model(folder, b"made of", whole, embeds=False)
    assert list_files(folder, recursive=True) == [MADE_OF_FILE, "weights"]


def test_weights_say_what_they_are_made_of_without_being_read(storage):
    place = join(storage, "some.safetensors")
    one = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.zeros(2, 2)}
    write_weights(place, one, {"run": "this", "start": ""})
    made_of = read_made_of(place)
    content = weights_digest(place)
    assert made_of == {"run": "this", "start": "", "content": content}
    write_weights(place, {**one, "b": torch.eye(2)}, {"run": "this", "start": ""})
    assert weights_digest(place) != content
    for broken in (b"", b"\x05", safetensors.torch.save(one), b"not safetensors at all"):
        write_atomic(place, broken)
        with pytest.raises(ArtifactError, match="does not hold the weights of a training stage"):
            read_made_of(place)
    with pytest.raises(ArtifactError, match="does not hold the weights of a training stage"):
        read_made_of(join(storage, "nowhere.safetensors"))


def test_no_flipped_bit_of_a_stages_weights_is_loaded(tmp_path):
    place = str(tmp_path / "weights.safetensors")
    state = {"a": torch.arange(40.0), "b": torch.ones(3, 5, dtype=torch.bfloat16)}
    write_weights(place, state, {"run": "this"})
    content = Path(place).read_bytes()
    assert read_weights(place)["a"].equal(state["a"]), "the control"
    rng = random.Random(0)
    for bit in rng.sample(range(8 * len(content)), 60):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        Path(place).write_bytes(changed)
        try:
            found = read_weights(place)
        except ArtifactError:
            continue
        # Of the header what is told beside the tensors.
        assert found.keys() == state.keys()
        assert all(found[name].equal(tensor) for name, tensor in state.items())
    middle = bytearray(content)
    middle[-100] ^= 4
    Path(place).write_bytes(middle)
    with pytest.raises(ArtifactError, match=r"weights\.safetensors' are broken: .*remove the file"):
        read_weights(place)
