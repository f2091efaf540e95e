"""The compression job on a model that a run trained: variants, their table, their versions."""

import json
import re
from types import SimpleNamespace

import mlflow
import pytest
from own_pairs import own_run

from rayembed.models.loading.load import load_model
from rayembed.models.saving.export import COMPRESSION_FILE
from rayembed.pipeline.register.job import run_register_job
from rayembed.pipeline.run.train import train
from rayembed_extras.compression.job import run_compression_job

pytestmark = pytest.mark.job

SPEED = "--set=speed={documents: 20, rounds: 1, threads: 1}"


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A trained model, and a set to score its variants on."""
    folder = tmp_path_factory.mktemp("compressed")
    outcome = train(own_run(folder, "evaluation.baselines=[]"))
    own = folder / "shop"
    (own / "qrels").mkdir(parents=True)
    for name, text in (("corpus", "all about {}"), ("queries", "what of {}")):
        rows = [{"_id": f"{i}", "text": text.format(i)} for i in range(30)]
        (own / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = "".join(f"{i}\t{i}\t1\n" for i in range(30))
    (own / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return SimpleNamespace(folder=folder, model=outcome.model_folder, own=own)


def run(given, *arguments, model=None):
    return run_compression_job(
        [
            *("--model", model or given.model, "--own-set", f"shop={given.own}"),
            f"--set=placement.storage_path={given.folder / 'outputs'}",
            "--set=model.dtype=float32",
            *arguments,
        ]
    )


def cells(text, label):
    """Cells of a row of the Markdown table."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {label} |")][:1]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_variants_stand_beside_the_model_and_are_made_once(given, capsys):
    asked = (
        *("--way", "magnitude", "--way", "magnitude,structure=2:4", "--name", "small"),
        *("--set=placement.registered_model=shop", "--set=calibration.number=40"),
    )
    assert run(given, *asked, SPEED) == 0
    told = capsys.readouterr().out
    folder = given.folder / "outputs" / "compressed" / "small"
    variants = sorted(path for path in folder.iterdir() if path.is_dir())
    assert len(variants) == 2
    for variant in variants:
        load_model(variant)
        assert json.loads((variant / COMPRESSION_FILE).read_text())["compressed"] > 0
        assert str(variant) in told
    table = (folder / "variants.md").read_text()
    original, plain = cells(table, "original"), cells(table, "magnitude-unstructured")
    assert original[1] == ""
    assert float(plain[1].rstrip("%")) > 5
    assert float(plain[4].split()[0]) > 0, "documents a second"
    assert (folder / "variants.png").read_bytes().startswith(b"\x89PNG")
    scores = {row: float(re.sub(r"[*]", "", cells(table, row)[-2])) for row in ("original",)}
    assert 0 < scores["original"] <= 1

    client = mlflow.MlflowClient(f"sqlite:///{given.folder}/outputs/mlflow.db")
    experiment = client.get_experiment_by_name("rayembed-compression")
    (tracked,) = client.search_runs([experiment.experiment_id])
    for label in ("original", "magnitude-unstructured", "magnitude-2of4"):
        assert tracked.data.metrics[f"size/{label}/bytes_on_disk"] > 0
        assert tracked.data.metrics[f"size/{label}/documents_per_second"] > 0
        assert any(key.startswith(f"score/{label}/") for key in tracked.data.metrics)
    report = {file.path for file in client.list_artifacts(tracked.info.run_id, "report")}
    assert report == {
        f"report/{name}"
        for name in ("compression.yaml", "variants.md", "variants.csv", "variants.png")
    }

    versions = client.search_model_versions("name='shop'")
    assert {version.tags["compression"] for version in versions} == {
        path.name.rpartition("-")[0] for path in variants
    }
    assert all(any("shop" in tag for tag in v.tags if tag.startswith("score.")) for v in versions)
    assert all(float(v.tags["documents_per_second"]) > 0 for v in versions)

    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    assert run(given, *asked, "--set=speed=null") == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == before
    assert len(client.search_model_versions("name='shop'")) == 2

    # Another compression of that name is refused before anything is made or written over.
    told = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    other = ("--way", "magnitude,sparsity=0.3", "--name", "small", "--set=speed=null")
    assert run(given, *other) == 1
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == told


def test_a_registered_model_is_compressed_with_the_texts_of_its_run(given, capsys):
    asked = (
        "--way",
        "wanda,structure=2:4,minimum_texts=40",
        "--name",
        "registered",
        "--set=speed=null",
    )
    number = "--set=calibration.number=40"
    assert run(given, *asked, number, model="models:/own@candidate") == 0
    (variant,) = (given.folder / "outputs" / "compressed" / "registered").glob("wanda*")
    made = json.loads((variant / COMPRESSION_FILE).read_text())
    assert made["compressed"] > 0
    # The same texts and weights as of the folder, so the same variant to the byte.
    again = (
        "--way",
        "wanda,structure=2:4,minimum_texts=40",
        "--name",
        "of-the-folder",
        "--set=speed=null",
    )
    assert run(given, *again, number) == 0
    (other,) = (given.folder / "outputs" / "compressed" / "of-the-folder").glob("wanda*")
    assert variant.name == other.name, "the digits are of way, weights and texts"
    for name in ("model.safetensors", COMPRESSION_FILE):
        assert (variant / name).read_bytes() == (other / name).read_bytes()
    capsys.readouterr()


def test_gates_take_a_variant_or_refuse_it(given, capsys):
    assert run(given, "--way", "magnitude,sparsity=0.3", "--name", "gated", "--set=speed=null",
               "--set=placement.registered_model=gated") == 0  # fmt: skip
    storage = f"--storage-path={given.folder / 'outputs'}"
    asked = ("--model", "models:/gated/1", "--promote", storage)
    assert run_register_job([*asked, "--require", "shop>=1.1"]) == 1
    assert run_register_job([*asked, "--require", "shop>=0.0"]) == 0
    client = mlflow.MlflowClient(f"sqlite:///{given.folder}/outputs/mlflow.db")
    assert client.get_registered_model("gated").aliases == {"champion": 1}
    capsys.readouterr()


def test_calibration_texts_are_those_of_the_run_and_of_files(given, tmp_path):
    from rayembed_extras.compression import compress
    from rayembed_extras.compression.run_settings import CalibrationConfig

    known = compress.run_of_folder(
        given.folder / "outputs" / "runs" / "own" / "models" / "finetune"
    )
    assert known is not None

    def calibration_texts(settings, run, **names):
        return compress.calibration_texts(settings, run, "finetune", **names)

    found = calibration_texts(CalibrationConfig(number=20), known, model="own")
    rows = [json.loads(line) for line in (given.folder / "pairs.jsonl").read_text().splitlines()]
    sides = {"query": {r["query"] for r in rows}, "document": {r["positive"] for r in rows}}
    assert len(set(found)) == 20
    assert {text.role for text in found} == {"query", "document"}
    assert all(text.text in sides[text.role] for text in found)
    again = calibration_texts(CalibrationConfig(number=20), known, model="own")
    other = calibration_texts(CalibrationConfig(number=20, seed=1), known, model="own")
    assert found == again
    assert found != other

    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(50)))
    settings = CalibrationConfig(path=str(path), number=30)
    of_file = calibration_texts(settings, known, model="own")
    assert {text.role for text in of_file} == {"document"}
    assert len({text.text for text in of_file}) == 30


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--way", "magnitude", "--way", "magnitude"), "two compression methods have the label"),
        (("--way", "vocabulary"), "rayembed sizes uses all texts of the training data"),
        (("--way", "magnitud"), "did you mean 'magnitude'"),
        (("--way", "magnitude,structure=2:4,sparsity=0.7"), "leave sparsity at 0.5"),
        (("--way", "magnitude", "--set=calibration.number=100000"), "--set speed=null"),
        (("--way", "wanda", "--set=calibration.number=100000"), "distinct texts"),
        (("--way", "magnitude", "--way", "wanda", "--set=calibration.number=40"), "needs at least"),
        ((), "no way to compress"),
    ],
)
def test_bad_input_is_refused_before_any_work(given, capsys, arguments, told):
    outputs = given.folder / "outputs"
    before = sorted(outputs.rglob("*"))
    assert run(given, *arguments) == 2
    assert told in capsys.readouterr().err
    assert sorted(outputs.rglob("*")) == before


def test_a_way_that_cannot_be_read_is_told_how_to_write_it(given, capsys):
    with pytest.raises(SystemExit):
        run(given, "--way", "magnitude,structure")
    assert "kind,setting=value" in capsys.readouterr().err


def test_a_model_of_unknown_training_needs_texts(given, tmp_path, capsys):
    load_model(given.model).save(tmp_path / "elsewhere")
    assert run(given, "--way", "magnitude", model=str(tmp_path / "elsewhere")) == 2
    assert "calibration.path=FILE" in capsys.readouterr().err


def test_a_dry_run_shows_the_settings_and_makes_nothing(given, capsys):
    before = sorted((given.folder / "outputs").rglob("*"))
    asked = ("--way", "magnitude", "--set=calibration.number=40", "--dry-run")
    assert run(given, *asked) == 0
    shown = capsys.readouterr()
    assert "kind: magnitude" in shown.out
    assert "40 calibration texts" in shown.err
    assert sorted((given.folder / "outputs").rglob("*")) == before
