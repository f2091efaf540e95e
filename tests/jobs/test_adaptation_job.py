"""The adaptation job on a tiny model: from texts to an encoder that nomic-moe starts from."""

import re

import mlflow
import pytest
import torch
from tiny_adaptation import save_masked, tiny_adaptation, write_corpus
from tiny_job import run_here

from rayembed.config.settings import parse
from rayembed.models.loading.build import build_model
from rayembed.models.nomic_moe.config import NomicMoeConfig
from rayembed.registry.metrics_log import MetricsLog
from rayembed_extras.adaptation.encoder import load_masked_language_model
from rayembed_extras.adaptation.job import run_adaptation_job
from rayembed_extras.adaptation.recipes import adaptation_names, get_adaptation
from rayembed_extras.adaptation.settings import Adaptation
from rayembed_extras.clean_runs.inventory import Inventory

pytestmark = pytest.mark.job


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    save_masked(folder / "bert", "xlm-roberta")
    write_corpus(folder)
    (folder / "run.yaml").write_text(tiny_adaptation(folder).to_yaml())
    done = run_here("adapt_encoder", "--recipe", f"{folder}/run.yaml")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, done


@pytest.mark.ray
def test_the_encoder_is_where_the_last_line_says_and_upcycling_starts_from_it(adapted):
    folder, done = adapted
    encoder = folder / "outputs" / "runs" / "tiny-adaptation" / "models" / "encoder"
    last = done.stdout.strip().splitlines()[-1]
    assert last == (
        f"Encoder {encoder}; next: rayembed train --recipe nomic-quickstart "
        f"--set model.backbone.path={encoder}"
    )
    run = tiny_adaptation(folder)
    settings = {"max_length": 32, "seed": run.seed}
    start = load_masked_language_model(folder / "bert", run.model, **settings)
    trained = load_masked_language_model(encoder, run.model, **settings)
    moved = {
        name: (value - trained.state_dict()[name]).abs().max().item()
        for name, value in start.state_dict().items()
    }
    assert min(moved["encoder.emb_ln.bias"], moved["head.dense.weight"]) > 1e-3
    experts = {"num_experts": 4}
    config = {"backbone": {"path": str(encoder), "dtype": "float32"}, "experts": experts}
    model = build_model(parse(NomicMoeConfig, config), encoder, seed=0)
    torch.testing.assert_close(model.backbone.emb_ln.bias, trained.encoder.emb_ln.bias)


@pytest.mark.ray
def test_a_run_that_is_done_has_no_checkpoints_and_names_the_data_that_it_uses(adapted):
    found = Inventory(str(adapted[0] / "outputs"))
    (run,) = found.runs
    assert (run.state, run.parts["checkpoints"]) == ("done", 0)
    assert run.parts["weights"] > 0
    assert len(found.prepared) > 1
    assert found.unused([run]) == {}
    assert found.unused([], [run]).keys() == {folder.place for folder in found.prepared}


@pytest.mark.ray
def test_steps_are_in_the_log_and_in_mlflow_with_metrics_by_language(adapted):
    folder, done = adapted
    records = MetricsLog(folder / "outputs/runs/tiny-adaptation/metrics.jsonl").records()
    assert [(r["stage"], r["step"]) for r in records] == [("adapt", n) for n in (1, 2, 3, 4)]
    assert records[-1]["loss"] < records[0]["loss"]
    for record in records:
        assert record["perplexity"] == pytest.approx(torch.tensor(record["loss"]).exp().item())
        assert 0 <= record["masked_accuracy"] <= 1
    client = mlflow.MlflowClient(f"sqlite:///{folder}/outputs/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "rayembed"]
    (kept,) = client.search_runs([experiment.experiment_id])
    assert kept.info.status == "FINISHED"
    assert kept.data.metrics["train/perplexity/en"] == records[-1]["perplexity/en"]
    assert kept.data.params["corpus.language_alpha"] == "0.3"
    for code in ("en", "fr", "sw"):
        assert f" {code} " in done.stdout
    assert re.search("stage adapt .*step 4/4", done.stderr)
    assert "sequences/s" in done.stderr


@pytest.mark.parametrize("name", adaptation_names())
def test_what_a_dry_run_prints_is_the_run(name, tmp_path, capsys):
    shown = ["--recipe", name, "--dry-run"]
    assert run_adaptation_job(shown) == 0
    captured = capsys.readouterr()
    (tmp_path / "run.yaml").write_text(captured.out)
    again, _ = run_adaptation_job.resolve(["--recipe", str(tmp_path / "run.yaml")])
    assert again == get_adaptation(name) == Adaptation.read(tmp_path / "run.yaml")
    assert again.fingerprint in captured.out.splitlines()[0]
    # XLM-R without positions and pooler, its vocabulary filled up, and its head.
    total = {"nomic-adapt": "277,935,808", "nomic-adapt-quickstart": "22,550,208"}[name]
    assert total in captured.err
    # 10,001 · 4,096 · 2,048 tokens of four bytes; sequences are of the corpus, not of the steps.
    plan = {"nomic-adapt": "312.53", "nomic-adapt-quickstart": "0.00"}[name]
    told = {row[0].strip(): row[1].strip() for row in rows_of(captured.err) if len(row) == 2}
    assert told["disk, plan"] == f"{plan} GiB at most, and as much again while it is made"
    assert "4 bytes for each token of the whole corpus" in told["disk, sequences"]


def rows_of(table):
    """Cells of the lines of a table with borders."""
    return [line.strip("│ ").split("│") for line in table.splitlines() if line.startswith("│")]


def test_wrong_settings_end_with_two_and_say_what_is_meant(capsys):
    def ends(*arguments):
        return run_adaptation_job(arguments)

    assert ends("--set", "training.step=3") == 2
    assert "did you mean 'steps'" in capsys.readouterr().err
    assert ends("--recipe", "nomic-adap") == 2
    assert "did you mean 'nomic-adapt'" in capsys.readouterr().err
    assert ends("--list") == 0
    assert "10,000 of 4,096 × 2,048 tokens" in capsys.readouterr().out
