"""A judge of rows computes in the number type of its machine."""

import json
from pathlib import Path

import mining_by_hand as by_hand
import pytest
from mining_step import prepared
from tiny_models import save_cross_encoder, save_encoder

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.mining import rescoring
from rayembed.data.vectors.teacher import TeacherLoader, weights_of
from rayembed.machine.hardware import Precision
from rayembed.pipeline.run.training_job import training_job
from rayembed_extras.synthesis.repair.repair import make_repaired


@pytest.fixture(autouse=True)
def no_model_is_kept():
    yield
    rescoring._load.cache_clear()


def loader_of(dtype: str) -> TeacherLoader:
    """Teachers of a machine that computes a number type fast."""
    return TeacherLoader(
        by_hand.load,
        lambda reference: reference if reference == "a" else weights_of(reference),
        lambda: Precision(dtype, "so"),
    )


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Number types that cross-encoders are loaded in."""
    types: list[str] = []
    model = rescoring._model

    def spy(reference, max_length, device, dtype):
        types.append(dtype)
        return model(reference, max_length, device, dtype)

    monkeypatch.setattr(rescoring, "_model", spy)
    return types


def test_a_judge_has_the_number_type_of_its_machine(tmp_path: Path, taken: list[str]) -> None:
    folder = str(save_cross_encoder(tmp_path / "reranker"))
    before = prepared(tmp_path, by_hand.made_up_rows(8, 4), 1)
    folders = set()
    for machine, asked in (("bfloat16", "auto"), ("bfloat16", "float32"), ("float32", "bfloat16")):
        judge = {"kind": "cross_encoder", "model": folder, "max_length": 24, "dtype": asked}
        dataset = parse(
            DatasetConfig,
            {
                "name": "d",
                "source": {"kind": "pairs", "path": "none", "negatives": "negatives"},
                "repair": {"judge": judge, "action": "drop"},
            },
        )
        context = PipelineContext(str(tmp_path / "out"), 0, teacher_loader=loader_of(machine))
        folders.add(make_repaired(context, dataset, before).folder)
    assert taken == ["bfloat16", "float32", "bfloat16"]
    assert len(folders) == 3


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        ("{kind: cross_encoder, model: /no/judge}", "repair.judge.model cannot be used"),
        (
            "{kind: endpoint, llm: {url: 'http://127.0.0.1:9/v1'}}",
            "repair.judge.llm.url = 'http://127.0.0.1:9/v1': nothing answers there",
        ),
    ],
)
def test_a_judge_that_is_not_there_is_told_before_work(judge, words, tmp_path, capsys):
    pairs = [{"query": f"q {i}", "positive": f"p {i}"} for i in range(200)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in pairs))
    encoder = save_encoder(tmp_path / "encoder")
    settings = {
        "data.datasets.pairs.source.path": tmp_path / "pairs.jsonl",
        "data.datasets.pairs.mining.teacher": encoder,
        "data.datasets.pairs.repair.judge": judge,
        "model.backbone.path": encoder,
        "stages.finetune.batch.num_negatives": 7,
        "placement.storage_path": tmp_path / "out",
    }
    argv = [f"--set={path}={value}" for path, value in settings.items()]
    assert training_job("biencoder")(argv) == 2
    assert f"data.datasets.pairs.{words}" in capsys.readouterr().err
    assert not (tmp_path / "out" / "data").exists()
