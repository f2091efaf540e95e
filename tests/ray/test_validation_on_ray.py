"""Scores in Ray tasks beside a stage's workers, and the weights that are chosen by them."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from made_up_records import made_up_records
from one_thread import one_thread
from scripted_scores import ScriptedScores, validation_by
from tiny_models import save_decoder

from rayembed.config.data_run import data_of
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.engine.on_ray import ray_pipeline_context
from rayembed.data.prepare import prepare
from rayembed.pipeline.run.validation import score_weights, validation_of
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog
from rayembed.training.job import StageJob
from rayembed.training.on_ray import train_on_ray
from rayembed.training.validation.folder import ValidationFolder, ValidationResult

pytestmark = pytest.mark.ray

STEPS, EVERY = 12, 3


def make_run(folder: Path, *, steps: int = STEPS, validation: dict | None, **placement) -> Run:
    source = {"kind": "pairs", "path": "words.jsonl", "negatives": "negatives"}
    return parse(
        Run,
        {
            "name": "tiny",
            "model": {
                "kind": "nvembed",
                "backbone": {"path": str(folder / "backbone"), "dtype": "float32"},
                "pooling": {"kind": "latent_attention", "num_latents": 4, "num_heads": 2},
                "lora": {"rank": 2, "alpha": 4, "dropout": 0.3},
                "query_max_length": 32,
                "document_max_length": 32,
            },
            "data": {
                "root": str(folder),
                "datasets": [{"name": "words", "source": source, "query_instruction": "find"}],
            },
            "stages": [
                {
                    "name": "only",
                    "datasets": {"words": 1},
                    "batch": {"global_pairs": 8, "num_negatives": 2, "in_batch_negatives": True},
                    "optimizer": {"learning_rate": 0.01, "warmup_steps": 1},
                    "steps": steps,
                    "checkpoint_every_steps": 4,
                }
            ],
            "evaluation": {"validation": validation},
            "placement": {
                "storage_path": str(folder / "out"),
                "zero_stage": 2,
                "micro_batch_tokens": 64,
                "validations_at_once": 2,
                **placement,
            },
        },
    )


def settings(**changes) -> dict:
    return {
        "data": {"kind": "beir", "path": "judged", "instruction": "find"},
        "every_steps": EVERY,
        **changes,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("validation")
    save_decoder(folder / "backbone")
    records = made_up_records(64)
    lines = [
        json.dumps(
            {
                "query": r.query,
                "positive": r.positives[0],
                "negatives": [n.text for n in r.negatives],
            }
        )
        for r in records
    ]
    (folder / "words.jsonl").write_text("\n".join(lines))
    judged = folder / "judged"
    (judged / "qrels").mkdir(parents=True)
    queries = [{"_id": f"q{i}", "text": r.query} for i, r in enumerate(records[:8])]
    documents = [{"_id": f"d{i}", "text": r.positives[0]} for i, r in enumerate(records[:12])]
    (judged / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (judged / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)))
    rows = [f"q{i}\td{i}\t1" for i in range(8)]
    (judged / "qrels" / "dev.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]))
    return folder


def prepare_on_ray(run: Run) -> dict[str, str]:
    return prepare(run, ray_pipeline_context(data_of(run)))


@pytest.fixture(scope="module")
def plan(cluster, folder):
    return prepare_on_ray(make_run(folder, validation=None))["only"]


def train(run: Run, plan: str, place: Path, validation=None) -> dict[str, torch.Tensor]:
    """Weights that the stage hands on."""
    weights = place / "weights.safetensors"
    validated_in = None if validation is None else str(place)
    job = StageJob(run, 0, plan, None, str(weights), validated_in=validated_in)
    place.mkdir(parents=True, exist_ok=True)
    train_on_ray(job, str(place), place / METRICS_FILE, 0, validation=validation)
    return safetensors.torch.load_file(weights)


def equal(found: dict, expected: dict) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in found)


@pytest.fixture(scope="module")
def real(cluster, folder, plan):
    """Weights of the last step, and what MLflow is told, of a stage with real scores."""
    run = make_run(folder, validation=settings(keep="last"))
    told: list[tuple[str, dict[str, float], int]] = []
    validation = validation_of(run, (), 100, lambda *given: told.append(given))
    return train(run, plan, folder / "out" / "real", validation), run, told


@pytest.fixture(scope="module")
def best(cluster, folder, plan):
    """A stage with the best score in the middle; the scoring of step 9 dies."""
    script = ScriptedScores(str(folder / "seen"), {3: 0.1, 6: 0.5, 12: 0.4}, frozenset({9}))
    told: list[ValidationResult] = []
    run = make_run(folder, validation=settings())
    weights = train(run, plan, folder / "out" / "best", validation_by(script, told))
    return weights, script, told


def test_the_best_scores_weights_are_handed_on_though_a_scoring_task_dies(best, real, folder):
    weights, script, told = best
    assert sorted(record.step for record in told) == [3, 6, 12]
    assert {record.step: record.score for record in told} == script.scores
    assert script.tries().count(9) == 2  # Ray tries a lost task again
    records = ValidationFolder(str(folder / "out" / "best")).records()
    assert records[9].score is None
    assert records[9].problem
    seen = {
        step: safetensors.torch.load_file(Path(script.seen) / f"{step}.safetensors")
        for step in script.scores
    }
    argmax = max(script.scores, key=lambda step: script.scores[step])
    assert equal(weights, seen[argmax])
    assert not equal(weights, seen[12])
    assert equal(seen[12], real[0])  # what is scored, and how, changes nothing of the training
    steps = [r["step"] for r in MetricsLog(folder / "out" / "best" / METRICS_FILE).records()]
    assert steps == list(range(1, STEPS + 1))
    left = sorted(path.name for path in (folder / "out" / "best" / "validation").iterdir())
    assert left == [f"step-{step:07d}.json" for step in (3, 6, 9, 12)]


def test_submitted_again_with_scores_to_come_it_chooses_the_same(best, folder, plan):
    """As a driver leaves it that is killed when workers are done and a score is not there yet."""
    weights, script, _ = best
    place = Path(shutil.copytree(folder / "out" / "best", folder / "out" / "again"))
    (place / "weights.safetensors").unlink()
    (place / "validation" / "step-0000012.json").unlink()
    for step in (6, 12):
        name = f"step-{step:07d}.safetensors"
        shutil.copy(Path(script.seen) / f"{step}.safetensors", place / "validation" / name)
    told: list[ValidationResult] = []
    again = ScriptedScores(str(folder / "seen-again"), {12: 0.4})
    run = make_run(folder, validation=settings())
    assert equal(train(run, plan, place, validation_by(again, told)), weights)
    assert again.tries() == [12]


def test_scores_end_a_stage_early(cluster, folder, plan):
    steps = 400
    scores = {step: 0.3 - step / 2000 for step in range(EVERY, steps + 1, EVERY)} | {steps: 0.9}
    scores[6] = 0.5
    script = ScriptedScores(str(folder / "seen-early"), scores)
    run = make_run(
        folder, steps=steps, validation=settings(early_stopping={"patience": 2, "min_delta": 0.01})
    )
    plan = prepare_on_ray(run)["only"]
    place = folder / "out" / "early"
    told: list[ValidationResult] = []
    weights = train(run, plan, place, validation_by(script, told))
    assert equal(weights, safetensors.torch.load_file(Path(script.seen) / "6.safetensors"))
    last = MetricsLog(place / METRICS_FILE).records()[-1]["step"]
    assert 12 <= last < steps
    assert last % EVERY == 0


def test_real_scores_are_those_of_the_weights_and_tell_the_step_of_the_run(real, folder):
    _, run, told = real
    assert sorted(step for _, _, step in told) == [103, 106, 109, 112]
    assert {name for name, _, _ in told} == {"validation"}
    last = {step: scores for _, scores, step in told}[112]
    with one_thread():
        here = score_weights((), run, str(folder / "out" / "real" / "weights.safetensors"), "cpu")
    assert last == pytest.approx({**here, "score": here["validation"]}, abs=1e-4)
    assert len({scores["validation"] for _, scores, _ in told}) > 1
