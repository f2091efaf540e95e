"""A stage that keeps the space of an old model: settings, loss by hand, runs, registered models."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from made_up_records import made_up_records
from made_up_teachers import TEACHERS
from mlflow import MlflowClient
from own_pairs import own_run
from plain_reference import reference_loss
from tiny_models import save_encoder
from toy_model import ToyModel

from rayembed.assets.resolver import resolve_model
from rayembed.config.loss import Widths
from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.config.types import SHORT_NAMES
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.errors import ConfigError
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.pipeline.checks.model import check_inputs
from rayembed.pipeline.register.registration import COMPATIBLE_TAG
from rayembed.pipeline.run.train import train
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry.registered_model import pinned_models
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.objective import StepSettings

OLD = "models:/support@champion"
STAGE = "stages.finetune"
PAIRS, NEGATIVES = 24, 2


def asked(*assignments):
    """The recipe for own pairs, with overrides."""
    return override(get_recipe("biencoder"), assignments)


def test_a_reference_becomes_a_teacher_and_its_loss():
    plain = asked()
    run = asked(f"{STAGE}.compatible_with={OLD}")
    (stage,), (before,) = run.stages, plain.stages
    assert (stage.loss.kind, stage.loss.projection, stage.loss.form) == (
        "vector_distillation",
        False,
        "cosine",
    )
    assert stage.loss.infonce_temperature == before.loss.temperature == 0.05
    assert (stage.loss.infonce_weight, stage.loss.teacher_documents) == (20, 0.3)
    (teacher,) = stage.teachers
    assert (teacher.teacher, teacher.max_length) == (OLD, 512)
    assert run.fingerprint != plain.fingerprint


@pytest.mark.parametrize(
    "given", [OLD, "all-MiniLM-L6-v2", f"{{model: {OLD}, weight: 4}}", "{model: /a/b, weight: 0.5}"]
)
def test_the_file_of_a_run_gives_the_same_run(given, tmp_path):
    run = asked(f"{STAGE}.compatible_with={given}")
    path = tmp_path / "run.yaml"
    path.write_text(run.to_yaml())
    again = Run.read(path)
    assert again == run
    assert again.fingerprint == run.fingerprint
    assert override(run, []) == run
    old = run.stages[0].compatible_with.model
    assert old == (SHORT_NAMES.get(given, old))
    assert f"compatible_with:\n    model: {old}" in run.to_yaml()


def test_the_weight_is_the_inverse_of_infonces():
    run = asked(f"{STAGE}.compatible_with={{model: {OLD}, weight: 4}}")
    assert run.stages[0].loss.infonce_weight == 0.25
    run = override(run, [f"{STAGE}.compatible_with.weight=2"])
    assert run.stages[0].loss.infonce_weight == 0.5
    run = override(run, [f"{STAGE}.loss.infonce_weight=0.7"])
    assert run.stages[0].loss.infonce_weight == 0.7
    run = override(run, [f"{STAGE}.teachers.0.max_length=64"])
    run = override(run, [f"{STAGE}.compatible_with=/other"])
    (teacher,) = run.stages[0].teachers
    assert (teacher.teacher, teacher.max_length) == ("/other", 64)


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("loss=siglip", r"does not allow; set stages\.finetune\.loss\.kind=infonce"),
        ("loss.kind=similarity_distillation", r"'similarity_distillation' does not allow"),
        ("loss={kind: vector_distillation, projection: true}", r"projection is true.*to false"),
        ("teachers=[{teacher: /a}, {teacher: /b}]", r"only teacher.*'/a', '/b'; set stages\.fine"),
        ("compatible_with={weight: 2}", r"compatible_with\.model' is required"),
        ("compatible_with={model: /a, weight: -1}", r"compatible_with\.weight = '-1': must be"),
        ("compatible_with=[a]", r"compatible_with"),
    ],
)
def test_what_cannot_stay_compatible_is_refused(assignment, told):
    with pytest.raises(ConfigError, match=told):
        asked(f"{STAGE}.compatible_with={OLD}", f"{STAGE}.{assignment}")


def compatible_stage(teacher, loss):
    batch = {"global_pairs": PAIRS, "num_negatives": NEGATIVES, "in_batch_negatives": True}
    values = {"name": "s", "datasets": {"d": 1}, "batch": batch, "loss": loss, "steps": 3}
    values["compatible_with"] = teacher
    return parse(StageConfig, values | {"optimizer": {"learning_rate": 0.1}})


def step_loss(config, teacher):
    model = ToyModel()
    batch = make_step_batch(0, made_up_records(PAIRS), NEGATIVES, model.tokenizer, [teacher])
    module = EngineModule(model, config.loss, (teacher.width,))
    assert not any(name.startswith("loss.") for name, _ in module.named_parameters())
    settings = StepSettings(40, True, torch.device("cpu"), pass_cost_tokens=1)
    return run_step(model, module, lambda loss, _: loss.backward(), batch, config, settings).loss


def distances(teacher, width):
    """Mean over records of half the query's distance and half its documents', by loops."""
    model, rows = ToyModel(), []

    def far(text, role):
        mine = model(model.tokenizer.collate(model.tokenizer([text], role))).embeddings[0][:width]
        theirs = teacher.of_text(text, role)[:width]
        return 1 - mine @ theirs / (mine.norm() * theirs.norm())

    for record in made_up_records(PAIRS):
        own = [record.positives[0], *(n.text for n in record.negatives[:NEGATIVES])]
        of_own = torch.stack([far(text, "document") for text in own]).mean()
        rows.append((far(record.query, "query") + of_own) / 2)
    return torch.stack(rows).mean().item()


def test_the_loss_is_the_distance_to_the_old_vectors_beside_infonce():
    teacher = TEACHERS[1]
    given = {"model": "old", "weight": 4}
    plain = {"kind": "infonce", "temperature": 0.1, "teacher_documents": 0}
    config = compatible_stage(given, plain)
    infonce = reference_loss(
        ToyModel(), made_up_records(PAIRS), temperature=0.1, num_negatives=NEGATIVES, in_batch=True
    ).item()
    expected = distances(teacher, 8) + infonce / 4
    assert step_loss(config, teacher) == pytest.approx(expected, rel=1e-5)
    other = step_loss(compatible_stage("old", plain), teacher)
    assert other == pytest.approx(expected + 19.75 * infonce, rel=1e-5)


def test_a_narrower_old_model_is_met_by_the_first_components():
    """At each width, the full one too, the first five components are compared."""
    teacher = TEACHERS[0]
    loss = {"kind": "vector_distillation", "infonce_weight": 0.0, "dimensions": [5, 3]}
    config = compatible_stage("old", loss)
    expected = 2 * distances(teacher, 5) + distances(teacher, 3)
    assert step_loss(config, teacher) == pytest.approx(expected, rel=1e-5)
    without = compatible_stage("old", loss | {"dimensions": [3]}).loss
    with pytest.raises(ConfigError, match=r"vectors have 8 dimensions and those .* 5; .*loss.dim"):
        without.initial_parameters(Widths(8, (5,)))
    with pytest.raises(
        ConfigError, match=r"8 dimensions and those of the stage's teachers have 13"
    ):
        without.initial_parameters(Widths(8, (13,)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compatible")


STEPS = (
    "placement.runtime=local",
    "placement.findings=[]",
    "evaluation.baselines=[]",
    f"{STAGE}.epochs=null",
    f"{STAGE}.steps=25",
)


@pytest.fixture(scope="module")
def trained(folder):
    """Outcomes of a compatible run and of the same run without the setting."""
    run = own_run(folder, *STEPS, "name=plain")
    given = f"{{model: {folder / 'encoder'}, weight: 20}}"
    kept = override(run, [f"{STAGE}.compatible_with={given}", "name=kept"])
    return train(kept), train(run)


def vectors(place, role):
    texts = [f"number {i} cats live in Paris" for i in range(40)]
    return encode(load_model(place), texts, role=role)


def test_compatible_training_keeps_the_old_vectors(folder, trained):
    cosines = []
    for outcome in trained:
        of_roles = [
            (vectors(outcome.model_folder, role) * vectors(folder / "encoder", role)).sum(axis=1)
            for role in ("query", "document")
        ]
        cosines.append(float(np.mean(of_roles)))
    kept, plain = cosines
    assert kept > 0.9
    assert plain < kept - 0.05, "the control without the setting"


def test_the_version_names_the_old_model(trained):
    kept, plain = trained
    client = MlflowClient(kept.tracking_uri, kept.tracking_uri)
    tags = [
        client.get_model_version(one.version.name, str(one.version.version)).tags
        for one in (kept, plain)
    ]
    assert tags[0][COMPATIBLE_TAG] == "encoder", "no folder of this machine"
    assert COMPATIBLE_TAG not in tags[1]


def test_an_alias_is_pinned_and_its_model_learnt_from(folder, trained, monkeypatch):
    del trained
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    new = own_run(
        folder,
        *STEPS,
        "name=second",
        f"{STAGE}.steps=2",
        f"{STAGE}.compatible_with=models:/kept@candidate",
    )
    with pinned_models(new) as pinned:
        stage = pinned.stages[0]
        assert stage.compatible_with.model == stage.teachers[0].teacher == "models:/kept/1"
        assert (resolve_model("models:/kept/1") / "modules.json").is_file()
    assert "MLFLOW_TRACKING_URI" not in os.environ
    outcome = train(new)
    assert outcome.run.stages[0].teachers[0].teacher == "models:/kept/1"
    client = MlflowClient(outcome.tracking_uri, outcome.tracking_uri)
    tags = client.get_model_version("second", str(outcome.version.version)).tags
    assert tags[COMPATIBLE_TAG] == "models:/kept/1"
    plain = own_run(folder)
    with pinned_models(plain) as pinned:
        assert pinned is plain


def test_an_old_model_of_another_width_is_refused_before_data_is_prepared(folder, monkeypatch):
    wide = save_encoder(folder / "wide", hidden_size=64)
    monkeypatch.setattr("rayembed.pipeline.run.train.prepare", lambda *_: pytest.fail("work began"))
    run = own_run(folder, *STEPS, "name=unfit", f"{STAGE}.compatible_with={wide}")
    with pytest.raises(
        ConfigError, match=r"vectors have 32 dimensions and those .* teachers have 64"
    ):
        train(run)


def test_the_old_model_must_have_the_prompts_of_its_index(folder, monkeypatch):
    run = own_run(folder, *STEPS, f"{STAGE}.compatible_with={folder / 'encoder'}")
    check_inputs(run)
    saved = {"query": "Instruct: find\nQuery: ", "document": ""}
    monkeypatch.setattr("rayembed.pipeline.checks.model.saved_prompts", lambda _: saved)
    with pytest.raises(ConfigError, match=r"teachers\.0\.query_prefix: .*'Instruct: find.*set sta"):
        check_inputs(run)
    check_inputs(override(run, [f"{STAGE}.teachers.0.query_prefix={saved['query']}"]))
    assert Path(run.stages[0].compatible_with.model).is_dir()
