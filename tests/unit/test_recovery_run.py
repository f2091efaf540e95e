"""A run over a pruned model with the original as its teacher, from its settings to the export."""

import shutil
from pathlib import Path

import pytest
from own_pairs import own_run
from pruned import moved_zeros, prune_folder
from safetensors.torch import load_file, save_file
from tiny_models import save_encoder

from rayembed.config.override import override
from rayembed.errors import ArtifactError, AssetError, ConfigError
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import load_model
from rayembed.models.saving.export import read_compression
from rayembed.pipeline.evaluate.guard import save_mixture
from rayembed.pipeline.run.train import provenance_of_teachers, train
from rayembed.proof.proof import read_proof
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Recovery of a pruned tiny encoder, which is also its teacher."""
    folder = tmp_path_factory.mktemp("recovery")
    run = own_run(folder, "placement.runtime=local", "evaluation.baselines=[]")
    prune_folder(folder / "encoder", folder / "pruned")
    return override(
        run,
        [
            f"model.backbone.path={folder / 'pruned'}",
            "model.keep_zeros=true",
            "stages.finetune.loss={kind: vector_distillation}",
            f"stages.finetune.teachers=[{{teacher: {folder / 'encoder'}, max_length: 32}}]",
        ],
    )


def test_it_ends_with_the_zeros_of_its_start(run, tmp_path):
    outcome = train(run)
    start = run.model.backbone.path
    model = load_model(outcome.model_folder)
    moved, number = moved_zeros(start, model.state_dict())
    assert (moved, number > 1000) == (0, True)
    before = load_model(start).state_dict()
    assert any((value != before[name]).any() for name, value in model.state_dict().items())
    told = read_compression(Path(outcome.model_folder))
    assert told["settings"] == {"kind": "drawn"}
    assert told["matrices"] == read_compression(Path(start))["matrices"]
    assert outcome.table.rows["stage 1: finetune"]
    base, mixture = f"{outcome.run_folder}/models/untrained", tmp_path / "mixture"
    save_mixture(base, "linear", 0.5, run, outcome.model_folder, str(mixture))
    assert read_compression(mixture) == told, "so that it is recovered further"
    assert moved_zeros(start, load_model(mixture).state_dict())[0] == 0
    for made in (base, outcome.model_folder, mixture):
        assert read_proof(Path(made)) is not None


def test_a_start_that_was_not_pruned_is_refused_before_a_worker_starts(run, monkeypatch):
    teacher = run.stages[0].teachers[0].teacher
    wrong = override(run, [f"model.backbone.path={teacher}", "name=wrong"])
    monkeypatch.setattr("rayembed.pipeline.run.train.prepare", lambda *_: pytest.fail("work began"))
    with pytest.raises(ConfigError, match=r"model\.keep_zeros.*was not pruned"):
        train(wrong)


def of_states(run, teacher, *further):
    """The run with the teacher's hidden states beside InfoNCE, in place of its vectors."""
    return override(
        run,
        [
            f"stages.finetune.hidden_states={{teacher: {teacher}, weight: 0.5}}",
            "stages.finetune.loss={kind: infonce}",
            "stages.finetune.teachers=[]",
            *further,
        ],
    )


def test_hidden_states_of_the_original_are_learnt(run, tmp_path):
    """The zeros stay, errors fall and are logged, and a teacher of other weights is told."""
    teacher = Path(run.stages[0].teachers[0].teacher)
    copy = shutil.copytree(teacher, tmp_path / "teacher")
    states = of_states(run, copy, "name=states")
    assert states.fingerprint != of_states(run, teacher).fingerprint
    found = provenance_of_teachers(states, {})["teachers_of_hidden_states"]
    assert found["finetune"] == {"teacher": str(copy), "weights": weights_fingerprint(copy)}
    outcome = train(states)
    model = load_model(outcome.model_folder)
    assert moved_zeros(run.model.backbone.path, model.state_dict())[0] == 0
    log = MetricsLog(Path(outcome.run_folder) / METRICS_FILE).records()
    errors = [record["hidden_states/error"] for record in log]
    assert errors[-1] < errors[0]
    train(states)  # goes on where it ended
    weights = load_file(copy / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, copy / "model.safetensors")
    with pytest.raises(ArtifactError, match="hidden states of"):
        train(states)


def test_a_teacher_whose_states_do_not_fit_is_refused_before_a_worker_starts(
    run, tmp_path, monkeypatch
):
    monkeypatch.setattr("rayembed.pipeline.run.train.prepare", lambda *_: pytest.fail("work began"))
    wide = save_encoder(tmp_path / "wide", hidden_size=64)
    for teacher, error, match in (
        (wide, ConfigError, r"finetune\.hidden_states\.teacher: the teacher's states are 64 wide"),
        (tmp_path / "none", AssetError, r"finetune\.hidden_states\.teacher cannot be used"),
    ):
        with pytest.raises(error, match=match):
            train(of_states(run, teacher, "name=unfit"))
