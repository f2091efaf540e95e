"""Members of the tables of losses, optimisers and schedules, each through the whole job."""

import json
from pathlib import Path

import pytest
import safetensors.torch
from own_pairs import own_run, write_pairs
from tiny_job import run_here
from tiny_models import save_encoder

pytestmark = pytest.mark.job

STAGE = "stages.finetune"
SIGLIP = [f"{STAGE}.loss.kind=siglip"]
MUON = [f"{STAGE}.optimizer.kind=muon", f"{STAGE}.optimizer.learning_rate=0.003"]
STAY_AND_FALL = [
    f"{STAGE}.optimizer.schedule.kind=wsd",
    f"{STAGE}.optimizer.schedule.decay_share=0.5",
]
LONGER = [
    f"{STAGE}.steps=12",
    "placement.storage_path={folder}/{name}",
    "placement.keep_states=true",
]


def train(folder: Path, name: str, *settings: str) -> Path:
    """Folder of a run that the job has done with the settings."""
    given = [*(text.format(folder=folder, name=name) for text in LONGER), *settings]
    (folder / f"{name}.yaml").write_text(own_run(folder, *given).to_yaml())
    done = run_here("train_biencoder", "--recipe", str(folder / f"{name}.yaml"))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / name / "runs" / "own"


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def falls(values: list[float]) -> bool:
    """Whether the last third lies below the first."""
    third = len(values) // 3
    return sum(values[-third:]) < sum(values[:third])


def weights(run: Path) -> dict:
    return safetensors.torch.load_file(run / "models" / "finetune" / "model.safetensors")


def learnt_beside_the_model(run: Path) -> set[str]:
    """Parameters of the loss in a run's checkpoint."""
    (state,) = run.glob("finetune/train/*/state-*.safetensors")
    names = {name.partition("|")[0] for name in safetensors.torch.load_file(state)}
    return {name for name in names if name.startswith("loss:")}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The recipe's own InfoNCE, AdamW and schedule."""
    folder = tmp_path_factory.mktemp("objectives")
    return folder, train(folder, "plain")


def test_a_loss_with_parameters_learns_them_and_leaves_them_out_of_the_model(plain):
    folder, other = plain
    run = train(folder, "siglip", *SIGLIP)
    steps = metrics(run)
    assert falls([step["loss"] for step in steps])
    for parameter in ("loss_log_scale", "loss_bias"):
        assert len({step[parameter] for step in steps}) == len(steps), parameter
        assert parameter not in metrics(other)[0]
    assert weights(run).keys() == weights(other).keys()
    assert learnt_beside_the_model(run) == {"loss:bias", "loss:log_scale"}
    assert learnt_beside_the_model(other) == set()


@pytest.mark.parametrize("settings", [MUON, STAY_AND_FALL, [*MUON, *STAY_AND_FALL]], ids=str)
def test_an_optimiser_and_a_schedule_train_another_model(plain, settings):
    folder, other = plain
    name = "-".join(text.rpartition("=")[2] for text in settings)
    run = train(folder, name, *settings)
    assert falls([step["loss"] for step in metrics(run)])
    ours, theirs = weights(run), weights(other)
    assert any(not ours[key].equal(theirs[key]) for key in ours)
    rates = [step["learning_rate"] for step in metrics(run)]
    stays = rates[3] == rates[5]
    assert stays == (settings[-1] in STAY_AND_FALL)


def test_graded_pairs_train_by_their_grades(tmp_path):
    write_pairs(tmp_path / "pairs.jsonl")
    save_encoder(tmp_path / "encoder")
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    rows = [
        {"first": one["query"], "second": other["positive"], "score": 5 if one is other else i % 4}
        for i, one in enumerate(pairs)
        for other in (one, pairs[(i + 7) % len(pairs)])
    ]
    path = tmp_path / "graded.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "graded", "path": str(path), "highest": 5}
    source |= {"first": "first", "second": "second"}
    run = train(
        tmp_path,
        "graded",
        "data.datasets.pairs.held_out=null",
        f"data.datasets.pairs.source={json.dumps(source)}",
        f"{STAGE}.loss.kind=cosent",
        f"{STAGE}.batch.in_batch_negatives=false",
        f"{STAGE}.batch.num_negatives=0",
    )
    assert falls([step["loss"] for step in metrics(run)])


@pytest.mark.parametrize("kind", ["listwise_kl", "margin_mse"])
def test_scores_of_mining_are_learnt_without_a_teacher(plain, kind):
    folder, _ = plain
    teacher = save_encoder(folder / "teacher", seed=3)
    mined = {"teacher": str(teacher), "num_negatives": 3, "sampling": "stratified"}
    mined |= {"rule": {"kind": "top_k"}}
    run = train(
        folder,
        kind,
        f"data.datasets.pairs.mining={json.dumps(mined)}",
        f"{STAGE}.batch.num_negatives=3",
        f"{STAGE}.loss.kind={kind}",
        f"{STAGE}.loss.infonce_weight=0",
        f"{STAGE}.steps=36",  # of twelve the thirds differ by less than batches do
    )
    assert falls([step["loss"] for step in metrics(run)])
    assert metrics(run)[0]["loss"] > 0
