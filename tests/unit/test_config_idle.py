"""Settings that were typed and cannot act: refused, or told in a warning."""

import io
from pathlib import Path

import pytest
import torch
from tiny_models import save_encoder
from torch.nn import functional

from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.idle import idle_clusters, idle_settings, without_idle_clusters
from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import changed, parse
from rayembed.config.stage import LOSSES
from rayembed.errors import ConfigError
from rayembed.evaluation.rayembed_spec import rayembed_spec
from rayembed.losses.contract import Candidates, TeacherScores, TeacherVectors
from rayembed.pipeline.checks.files import AtHand
from rayembed.pipeline.run import train
from rayembed.pipeline.run.dry_run import print_dry_run
from rayembed.pipeline.run.training_job import training_job
from rayembed.recipes.catalogue import get_recipe, recipe_names

STAGE, PAIRS = "stages.finetune", "data.datasets.pairs"
MINED = (f"{PAIRS}.mining={{teacher: t, num_negatives: 2}}", f"{STAGE}.batch.num_negatives=2")
UNSCORED = (f"{PAIRS}.held_out=null", "evaluation.guard=null", "evaluation.benchmarks=[]")
ALONE = f"{STAGE}.loss={{kind: margin_mse, infonce_weight: 0}}"
HELD_OUT = "evaluation.validation={data: {kind: held_out}, every_steps: 2}"

CASES = {
    "warm-up": (
        [f"{STAGE}.optimizer.warmup_steps=7"],
        "warmup_share=0.1 has no effect with warmup_steps=7",
        [f"{STAGE}.optimizer.warmup_steps=7", f"{STAGE}.optimizer.warmup_share=null"],
    ),
    "in-batch": (
        [*MINED, ALONE],
        f"{STAGE}.batch.in_batch_negatives=true has no effect: the loss 'margin_mse'",
        [*MINED, ALONE, f"{STAGE}.loss.spread_out=0.1"],
    ),
    "in-batch, not asked": (
        [*MINED, ALONE],
        "in_batch_negatives=true",
        [*MINED, ALONE, f"{STAGE}.batch.in_batch_negatives=false"],
    ),
    "baselines": (
        UNSCORED,
        "evaluation.baselines=[bm25] are not scored: the run takes no scores",
        [*UNSCORED, "evaluation.baselines=[]"],
    ),
    "validation": (
        ["placement.validations_at_once=4"],
        "placement.validations_at_once=4 has no effect: evaluation.validation is null",
        ["placement.validations_at_once=4", HELD_OUT],
    ),
    "validation's GPUs": (
        ["placement.validation_gpus=0.5"],
        "placement.validation_gpus=0.5 has no effect",
        ["placement.validation_gpus=0.5", HELD_OUT],
    ),
    "resizing": (
        ["placement.resize_interval_seconds=5", "placement.workers=2"],
        "placement.resize_interval_seconds=5.0 has no effect: the number of workers is fixed",
        [
            "placement.resize_interval_seconds=5",
            "placement.workers=2",
            "placement.min_workers=1",
        ],
    ),
}
"""Settings, the line about them, and settings under which it is not told."""


def run_of(*assignments: str) -> Run:
    return override(get_recipe("biencoder"), list(assignments))


@pytest.mark.parametrize(("idle", "line", "acting"), CASES.values(), ids=CASES)
def test_what_has_no_effect_is_told(idle: list[str], line: str, acting: list[str]) -> None:
    (told,) = idle_settings(run_of(*idle))
    assert line in told
    assert idle_settings(run_of(*acting)) == []


def test_a_dry_run_tells_what_has_no_effect() -> None:
    shown = {}
    for name, assignments in {"typed": ["placement.validations_at_once=4"], "not": []}.items():
        tables = io.StringIO()
        run = run_of(*assignments)
        print_dry_run(run, AtHand(run), out=io.StringIO(), tables=tables)
        shown[name] = tables.getvalue()
    assert "No effect: placement.validations_at_once=4" in shown["typed"]
    assert "No effect" not in shown["not"]


def test_a_graphs_number_type_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_encoder(tmp_path / "model")
    asked = ModelUnderTest(reference=str(tmp_path / "model"), dtype="bfloat16")
    rayembed_spec(asked)
    assert "no effect" not in caplog.text
    monkeypatch.setattr("rayembed.evaluation.rayembed_spec.stated_format", lambda folder: "graph")
    assert rayembed_spec(asked.model_copy(update={"dtype": "auto"})).settings.dtype == "saved"
    assert "no effect" not in caplog.text
    assert rayembed_spec(asked).settings.dtype == "saved"
    assert "model.dtype=bfloat16 has no effect" in caplog.text


POLICY = "stages.retrieval.batch.policy"


def test_clusters_that_no_stage_takes_are_left_out_and_told() -> None:
    """A teacher would embed all texts, and the rest of the last batch be dropped, for nothing."""
    acting = get_recipe("cde")
    (stage,) = acting.stages
    idle = override(acting, [f"stages.{stage.name}.batch.policy=homogeneous"])
    assert idle.data == acting.data
    names = [d.name for d in acting.data.datasets if d.clusters is not None]
    assert idle_clusters(idle) == [
        f"data.datasets.{name}.clusters are not made: no stage takes them "
        f"(stages.{stage.name}.batch.policy=homogeneous); batch.policy=clustered does"
        for name in names
    ]
    done = without_idle_clusters(idle)
    assert all(dataset.clusters is None for dataset in done.data.datasets)
    written = override(idle, [f"data.datasets.{name}.clusters=null" for name in names])
    assert done.fingerprint == written.fingerprint
    assert idle_clusters(done) == []
    # Those that act stay, also for one of several stages, and with them the fingerprint.
    both = changed(acting, stages=(changed(idle.stages[0], name="first"), stage))
    for run in (acting, both):
        assert idle_clusters(run) == []
        assert without_idle_clusters(run) is run


def test_a_dry_run_prints_what_is_done_and_tells_which_clusters_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = {}
    for policy in ("clustered", "homogeneous"):
        assert training_job("cde-quickstart")(["--dry-run", "--set", f"{POLICY}={policy}"]) == 0
        written[policy] = capsys.readouterr()
    file = tmp_path / "run.yaml"
    for policy, made in (("clustered", True), ("homogeneous", False)):
        file.write_text(written[policy].out)
        datasets = Run.read(file).data.datasets
        assert any(dataset.clusters is not None for dataset in datasets) == made
        told = "clusters are not made: no stage takes them" in written[policy].err
        assert told == (not made)


def test_a_run_is_trained_and_kept_without_idle_clusters(tmp_path: Path) -> None:
    to_storage = f"placement.storage_path={tmp_path}"
    for policy, made in (("clustered", True), ("homogeneous", False)):
        run = override(get_recipe("cde-quickstart"), [f"{POLICY}={policy}", to_storage])
        with train.claimed_run(run, wait=False) as (claimed, _):
            assert any(dataset.clusters is not None for dataset in claimed.data.datasets) == made


def test_recipes_have_no_idle_settings() -> None:
    assert [idle_settings(get_recipe(name)) for name in recipe_names()] == [[]] * len(
        recipe_names()
    )


TEACHERS = f"{STAGE}.teachers=[{{teacher: t}}]"


@pytest.mark.parametrize(
    ("kind", "by", "settings"),
    [
        ("listwise_kl", "mining", MINED),
        ("margin_mse", "teachers", (*MINED, TEACHERS)),
        ("vector_distillation", "teachers", (TEACHERS,)),
        ("similarity_distillation", "teachers", (TEACHERS,)),
    ],
)
def test_false_negatives_of_nothing_are_refused(
    kind: str, by: str, settings: tuple[str, ...]
) -> None:
    loss = f"{STAGE}.loss={{kind: {kind}, infonce_weight: 0, false_negatives: {{by: {by}}}}}"
    with pytest.raises(ConfigError, match=r"loss: .*false_negatives has no effect"):
        run_of(*settings, loss)
    run_of(*settings, loss.replace("infonce_weight: 0", "infonce_weight: 0.1"))
    run_of(*settings, loss.replace("infonce_weight: 0", "infonce_weight: 0, spread_out: 0.1"))


@pytest.mark.parametrize(
    "kind", ["listwise_kl", "margin_mse", "vector_distillation", "similarity_distillation"]
)
def test_without_infonce_no_mask_changes_a_loss(kind: str) -> None:
    """Why they are refused."""
    torch.manual_seed(0)
    rows, own, width = 4, 3, 8
    queries = functional.normalize(torch.randn(rows, width), dim=1)
    documents = functional.normalize(torch.randn(rows * own, width), dim=1)
    places = torch.arange(rows * own).view(rows, own)
    everywhere = torch.ones(rows, rows * own, dtype=torch.bool)
    teacher = functional.normalize(torch.randn(rows * own, width), dim=1).half()
    known = TeacherVectors(
        (queries.half(),), (teacher,), places, torch.ones(rows, own, dtype=torch.bool), everywhere
    )
    scores = TeacherScores(places, torch.rand(rows, own))
    masks = everywhere, torch.zeros_like(everywhere).scatter(1, places[:, :1], True)

    def found(weight: float) -> list[torch.Tensor]:
        loss = parse(LOSSES.classes()[kind], {"infonce_weight": weight})
        return [
            loss.of_rows(queries, Candidates(documents, places[:, 0], mask, scores, known), {})
            for mask in masks
        ]

    assert torch.equal(*found(0.0))
    assert not torch.equal(*found(0.5))
