"""Weights take their type one by one while they are loaded, and storage is read once a machine."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pyarrow.fs
import pytest
import torch
from garbling import damaged
from safetensors.torch import load_file, save_file
from tiny_models import save_decoder, save_encoder, save_nomic

from rayembed.assets import resolver as object_storage
from rayembed.config.backbone import BackboneConfig, LatentAttentionPooling
from rayembed.config.mining import MiningConfig
from rayembed.config.settings import parse
from rayembed.data.vectors import teacher
from rayembed.models.architecture import architecture_of
from rayembed.models.loading import files
from rayembed.models.loading.build import build_model, shapes_of
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import load_model
from rayembed.models.loading.saved_folder import POOLING_FILE, load_head
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.passes.encoding import encode
from rayembed.training.memory.graph_room import LiveBytes

TEXTS = ["are cats larger than dogs", "the quick brown fox", "Paris"]


@pytest.fixture(autouse=True)
def no_threads_in_loading(monkeypatch):
    """Operations of transformers' loading are counted in this thread."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")


def nvembed(folder):
    """A model with a head of two thirds of its weights, saved in float32."""
    backbone = save_decoder(folder / "start", "mistral")
    pooling = LatentAttentionPooling(num_latents=64, num_heads=4, head_dim=64, mlp_ratio=8)
    config = NVEmbedConfig(
        backbone=BackboneConfig(path="unused", dtype="float32"), pooling=pooling, lora=None
    )
    build_model(config, backbone, seed=0).save(folder / "model")
    return folder / "model"


def nomic_in_bfloat16(folder):
    place = save_nomic(folder / "model")
    file = next(place.glob("*.safetensors"))
    save_file({k: v.bfloat16() for k, v in load_file(file).items()}, file, {"format": "pt"})
    return place


class OwnBytes(LiveBytes):
    """Bytes of memory of one's own: neither on the meta device nor mapped from a file of weights,
    whose pages all processes of a machine share and the system drops when memory is short.
    """

    def _note(self, storage):
        if storage.device.type == "meta" or is_mapped(storage.data_ptr()):
            self._known.add(storage)
        super()._note(storage)


def is_mapped(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if first <= address < last:
                return True
    return False


def bytes_of(model):
    return sum(tensor.nbytes for tensor in model.state_dict().values())


@pytest.mark.parametrize(
    "save", [nvembed, nomic_in_bfloat16, lambda folder: save_encoder(folder / "model")]
)
def test_a_model_in_bfloat16_is_never_there_in_float32(tmp_path, save):
    folder = save(tmp_path)
    with OwnBytes() as live:
        found = load_model(folder, dtype="bfloat16")
    largest = max(tensor.numel() for tensor in found.state_dict().values())
    # The weights in bfloat16, one on its way, and a trial of the attention mask.
    assert live.peak <= bytes_of(found) + 8 * largest + 200_000
    expected = load_model(folder, dtype="float32").to(torch.bfloat16).state_dict()
    assert expected.keys() == found.state_dict().keys()
    for name, value in found.state_dict().items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name
    both = [
        encode(model, TEXTS, role="document")
        for model in (found, load_model(folder, dtype="bfloat16"))
    ]
    np.testing.assert_array_equal(*both)


def test_a_head_that_is_cast_when_it_is_loaded_takes_twice_the_memory(tmp_path):
    """The control: what a model's head took before it was built without memory."""
    folder = nvembed(tmp_path)
    model = load_model(folder, dtype="bfloat16")
    architecture, shapes = architecture_of(model.config), shapes_of(model.parts)
    with OwnBytes() as cast:
        head = architecture.build_head(model.config, shapes)
        load_head(head, folder / POOLING_FILE)
        head.to(torch.bfloat16)
    with OwnBytes() as one_by_one:
        with torch.device("meta"):
            lazy = architecture.build_head(model.config, shapes)
        load_head(lazy, folder / POOLING_FILE, torch.bfloat16)
    size = bytes_of(lazy)
    assert one_by_one.peak == pytest.approx(size, rel=0.01)
    assert cast.peak > 1.9 * size
    for one, other in zip(head.parameters(), lazy.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad


def test_a_float32_teacher_has_its_narrow_layers_alone_in_memory(tmp_path):
    folder = save_decoder(tmp_path / "teacher", hidden_size=128, intermediate_size=512)
    config = parse(MiningConfig, {"teacher": str(folder), "dtype": "bfloat16"})
    teacher._load.cache_clear()
    with OwnBytes() as live:
        teacher.load_teacher(config, weights_fingerprint(folder))
    teacher._load.cache_clear()
    whole = sum(value.nbytes for value in load_file(folder / "model.safetensors").values())
    # Half of the linear layers' bytes; all other weights stay mapped from their file.
    assert live.peak < 0.6 * whole


class CountingFileSystem(fsspec.get_filesystem_class("memory")):
    """Memory that counts how often each file is read."""

    protocol = "counted"
    reads: ClassVar[dict[str, int]] = {}

    def _open(self, path, mode="rb", **options):
        if "r" in mode:
            self.reads[path] = self.reads.get(path, 0) + 1
        return super()._open(path, mode, **options)


def test_workers_of_a_machine_read_a_model_from_storage_once(tmp_path):
    there = CountingFileSystem(skip_instance_cache=True)
    for name in ("config.json", "model.safetensors"):
        there.pipe(f"/bucket/model/{name}", name.encode() * 1000)
    CountingFileSystem.reads.clear()
    bridged = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(there))
    start = threading.Barrier(4)

    def worker(_):
        start.wait(10)
        return object_storage.copy_to_cache("s3://bucket/model", bridged, "/bucket/model", tmp_path)

    with ThreadPoolExecutor(4) as workers:
        folders = set(workers.map(worker, range(4)))
    assert len(folders) == 1
    assert sorted(CountingFileSystem.reads.values()) == [1, 1]


@pytest.fixture
def hashed(monkeypatch):
    """Folders whose files were read for a fingerprint."""
    folders, read = [], files._fingerprint_of
    monkeypatch.setattr(
        files,
        "_fingerprint_of",
        lambda folder, names: folders.append(folder) or read(folder, names),
    )
    return folders


def settled(folder: Path, seconds: float = 0.0) -> None:
    """Let an hour pass for the files of a folder."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 3600 + seconds,) * 2)


def test_workers_of_a_machine_hash_weights_once_until_they_are_written_again(
    tmp_path, monkeypatch, hashed
):
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    folder = save_encoder(tmp_path / "model")
    first = weights_fingerprint(folder)
    assert weights_fingerprint(folder) == first
    assert len(hashed) == 2, "files that were just written are read each time"
    # Their status changed now, and a test cannot wait until that is long ago.
    monkeypatch.setattr(files, "_SETTLED_SECONDS", -1.0)
    settled(folder)
    with ThreadPoolExecutor(4) as workers:
        assert set(workers.map(weights_fingerprint, [folder] * 8)) == {first}
    assert len(hashed) == 3
    (kept,) = (tmp_path / "cache").glob("digests/*/files/*")
    kept.write_bytes(damaged(kept.read_bytes(), "flip", "a digit"))
    assert weights_fingerprint(folder) == first, "what is kept is compared with its digest"
    assert len(hashed) == 4
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    settled(folder)
    assert weights_fingerprint(folder) != first, "same size and time of content, other status"
    assert len(hashed) == 5


def test_without_a_cache_folder_none_is_made(tmp_path, monkeypatch, hashed):
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_SETTLED_SECONDS", -1.0)
    folder = save_encoder(tmp_path / "model")
    assert weights_fingerprint(folder) == weights_fingerprint(folder)
    assert len(hashed) == 2
    assert not (tmp_path / "cache").exists()
