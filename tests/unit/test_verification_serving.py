"""Our own server against the proof of the right model: mistakes planted in a folder's settings."""

import json
import shutil
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn
from proved_models import save_proved

from rayembed.models.loading.load import load_model
from rayembed.proof.proof import PROOF_FOLDER, read_proof
from rayembed_extras.serving.app import make_app
from rayembed_extras.serving.service import EmbeddingService
from rayembed_extras.serving.settings import Limits
from rayembed_extras.verification import verify


def settings(**changes):
    """Change the settings of a folder, for rayembed and for sentence-transformers."""

    def change(folder):
        edit(folder / "rayembed.json", lambda values: values["model"].update(changes))
        prompts = {role: changes.get(f"{role}_prefix") for role in ("query", "document")}
        prompts = {role: text for role, text in prompts.items() if text is not None}
        stated = folder / "config_sentence_transformers.json"
        edit(stated, lambda values: values["prompts"].update(prompts))
        if length := changes.get("document_max_length"):
            path = folder / "sentence_bert_config.json"
            edit(path, lambda values: values.update(max_seq_length=length))

    return change


def edit(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def pooling(kind):
    def change(folder):
        settings(pooling={"kind": kind})(folder)
        modes = {"mean": "mean_tokens", "cls": "cls_token", "eos": "lasttoken"}
        stated = {f"pooling_mode_{mode}": own == kind for own, mode in modes.items()}
        edit(folder / "1_Pooling" / "config.json", lambda values: values.update(stated))

    return change


def tokens(change):
    return lambda folder: edit(folder / "tokenizer.json", change)


def no_eos(values):
    values["post_processor"]["single"].pop()


def double_bos(values):
    values["post_processor"]["single"].insert(0, values["post_processor"]["single"][0])


def lower(values):
    rules = [{"type": "Lowercase"}]
    values["normalizer"] = {"type": "Sequence", "normalizers": rules}


PLANTED = [
    ("mean", settings(query_prefix="", document_prefix=""), "no_prompt"),
    ("mean", settings(query_prefix="the world ", document_prefix="where "), "wrong_role"),
    ("mean", settings(query_max_length=256, document_max_length=256), "cut_at_256"),
    ("mean", pooling("cls"), "cls_pooling"),
    ("last", pooling("mean"), "mean_pooling"),
    ("last", tokens(no_eos), "no_eos"),
    ("last", tokens(double_bos), "double_bos"),
    ("last", tokens(lower), "lower_cased"),
    ("mean", lambda folder: None, None),
    ("last", lambda folder: None, None),
]


@contextmanager
def served(folder):
    """Address of the server of a folder."""
    service = EmbeddingService("small", load_model(folder, dtype="float32"))
    app = make_app({"small": service}, Limits())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    return {kind: save_proved(home / kind, kind) for kind in ("mean", "last")}


@pytest.mark.parametrize(("kind", "plant", "name"), PLANTED)
def test_a_mistake_in_a_served_folder_is_named(kind, plant, name, models, tmp_path):
    proof = read_proof(models[kind])
    copy = tmp_path / "copy"
    shutil.copytree(models[kind], copy)
    shutil.rmtree(copy / PROOF_FOLDER)
    plant(copy)
    with served(copy) as url:
        verdict = verify(url, proof, repeat=1)
    assert verdict.mistakes == ((name,) if name else ()), verdict.line
    assert verdict.same == (name is None)
    assert "names role and instruction" in verdict.notes[0]
    if name == "no_prompt":
        assert any(line.startswith("rayembed: name role") for line in verdict.advice)
