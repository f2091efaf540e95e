"""The registered MLflow model compares itself with the proof when it is loaded."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from tiny_folders import save_biencoder, save_nvembed

from rayembed.proof.proof import read_proof
from rayembed.proof.write import write_proof
from rayembed.registry.pyfunc_model import OpenAIEmbeddings


def loaded(folder):
    model = OpenAIEmbeddings()
    model.load_context(
        SimpleNamespace(model_config={"dimensions": [32]}, artifacts={"model": str(folder)})
    )
    return model


@pytest.mark.parametrize("save", [save_biencoder, save_nvembed])
def test_a_model_with_other_vectors_is_not_loaded(save, tmp_path):
    folder = save(tmp_path / "model")
    assert loaded(folder), "a folder without a proof is"
    write_proof(folder)
    model = loaded(folder)
    assert len(model.predict(None, {"input": ["Paris"]})["data"]) == 1
    proof = read_proof(folder)
    turned = np.roll(proof.vectors, 1, axis=1)
    made_by = {**proof.made_by, "torch": "1.0"}
    replace(proof, vectors=turned, made_by=made_by).write(folder)
    with pytest.raises(MlflowException, match="gives other vectors here than where it was") as told:
        loaded(folder)
    assert "remove its folder proof (the stored reference vectors) to load" in str(told.value)
    assert "computed with torch 1.0 (here " in str(told.value)


def test_a_model_with_a_proof_of_an_earlier_format_is_loaded_with_a_warning(tmp_path, caplog):
    folder = save_biencoder(tmp_path / "model")
    write_proof(folder)
    path = folder / "proof" / "proof.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    assert loaded(folder)
    assert "have the earlier format 1" in caplog.text


def test_texts_of_each_role_and_instruction_are_embedded_few_of_each(tmp_path, monkeypatch):
    folder = save_biencoder(tmp_path / "model")
    write_proof(folder)
    seen = []
    embed = OpenAIEmbeddings._embed

    def counted(self, texts, options):
        seen.append(options.role)
        return embed(self, texts, options)

    monkeypatch.setattr(OpenAIEmbeddings, "_embed", counted)
    loaded(folder)
    assert sorted(seen) == ["document"] * 3 + ["query"] * 3
