"""The software of teachers and cross-encoders: what counts for which, what is refused and told."""

import json
from pathlib import Path

import pytest
from tiny_folders import save_biencoder
from tiny_models import save_cross_encoder

from rayembed.config.mining import Teacher
from rayembed.data.vectors import teacher as teacher_module
from rayembed.data.vectors.software import (
    cross_encoders_software,
    note_software,
    software_here,
    teachers_software,
)
from rayembed.data.vectors.teacher import load_teacher, weights_of
from rayembed.errors import ArtifactError
from rayembed.models import code_version

PLAIN = {"code of rayembed", "rayembed", "tokenizers", "torch", "transformers"}


@pytest.fixture
def installed(monkeypatch) -> dict[str, str]:
    """Sets the version of a package; empty: it is not installed."""
    changed: dict[str, str] = {}
    real = code_version.version

    def version(name: str) -> str:
        found = changed[name] if name in changed else real(name)
        if not found:
            raise code_version.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(code_version, "version", version)
    return changed


def test_a_teacher_counts_what_computes_it_alone(tmp_path, installed) -> None:
    folder = save_biencoder(tmp_path / "teacher")
    plain = teachers_software(str(folder))
    assert set(plain) == PLAIN
    for others in ("", "99.0"):
        installed |= dict.fromkeys(("onnxruntime", "openvino", "compressed-tensors"), others)
        assert teachers_software(str(folder)) == plain
    path = folder / "config.json"
    packed = {"quantization_config": {"quant_method": "compressed-tensors"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **packed}))
    assert teachers_software(str(folder)) == plain | {"compressed-tensors": "99.0"}
    installed["compressed-tensors"] = ""
    assert teachers_software(str(folder)) == plain | {"compressed-tensors": "not installed"}


def test_a_cross_encoder_counts_what_computes_it_alone(tmp_path, installed) -> None:
    folder = save_cross_encoder(tmp_path / "reranker")
    plain = cross_encoders_software(str(folder))
    assert set(plain) == PLAIN | {"sentence-transformers"}
    installed |= dict.fromkeys(("onnxruntime", "openvino", "compressed-tensors"), "99.0")
    assert cross_encoders_software(str(folder)) == plain
    installed["sentence-transformers"] = "99.0"
    assert cross_encoders_software(str(folder)) != plain


def test_a_machine_with_other_software_embeds_nothing(tmp_path, installed) -> None:
    folder = save_biencoder(tmp_path / "teacher")
    teacher = Teacher(teacher=str(folder), dtype="float32")
    weights = weights_of(str(folder))
    installed |= {"torch": "98.0", "onnxruntime": "98.0"}
    began = software_here()
    for others in ("", "99.0"):  # which the teacher does not use
        installed |= dict.fromkeys(("onnxruntime", "openvino"), others)
        teacher_module._check_software.cache_clear()
        load_teacher(teacher, weights, began=began)
    installed["torch"] = "99.0"
    teacher_module._check_software.cache_clear()
    wrong = r"other software on this machine than where .* \(torch 99\.0, there 98\.0\); install"
    with pytest.raises(ArtifactError, match=wrong):
        load_teacher(teacher, weights, began=began)
    teacher_module._check_software.cache_clear()


def test_the_warning_tells_what_was_and_what_is(tmp_path, caplog) -> None:
    record = str(tmp_path / "settings.json")

    def told(now: dict[str, str], unknown: bool = False) -> list[str]:
        caplog.clear()
        note_software(record, "teacher m", now, unknown=unknown)
        assert json.loads(Path(record).read_text())["packages"] == now
        return [message.partition("(")[2].partition(")")[0] for message in caplog.messages]

    assert told({"torch": "1", "openvino": "2"}) == []
    assert told({"torch": "1", "openvino": "2"}, unknown=True) == [], "the record is the newer"
    assert told({"torch": "1", "openvino": "not installed"}) == ["openvino 2 is now not installed"]
    assert told({"torch": "2", "code of rayembed": "a"}) == [
        "torch 1 is now 2; openvino not installed is now not counted; "
        "code of rayembed not counted is now a"
    ]
    assert told({"torch": "2", "code of rayembed": "b"}) == ["code of rayembed a is now b"]
