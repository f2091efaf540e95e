"""A family of sizes: cut, distilled, scored, in one table; done sizes stay."""

import csv
import json
from pathlib import Path

import pytest
from own_pairs import own_run, write_pairs
from tiny_models import save_modern_encoder

from rayembed.config.named_benchmarks import with_named_benchmarks
from rayembed.config.override import override
from rayembed.errors import ConfigError
from rayembed.evaluation.tables import ScoreKey
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import load_model
from rayembed_extras.compression import sizes as sizes_module
from rayembed_extras.compression.layers import Layers
from rayembed_extras.compression.settings import COMPRESSIONS
from rayembed_extras.compression.sizes import make_sizes, recovery
from rayembed_extras.compression.sizes_job import run_sizes_job
from rayembed_extras.compression.vocabulary import Vocabulary

SIZES = {
    "layers-0.4": (Layers(share=0.4),),
    "vocabulary-layers-2": (Vocabulary(), Layers(number=2)),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    save_modern_encoder(folder / "encoder")  # of three layers
    write_pairs(folder / "pairs.jsonl")
    changes = ["placement.runtime=local", "evaluation.baselines=[]"]
    return override(own_run(folder), changes)


def test_each_size_is_distilled_from_the_whole_model(run, tmp_path):
    small = recovery(run, "0.5", run.model.backbone.path, "cut")
    (stage,) = small.stages
    assert small.name == "own-0_5"
    assert small.model.backbone.path == "cut"
    assert stage.loss.kind == "vector_distillation"
    assert stage.loss.infonce_temperature == run.stages[0].loss.temperature
    assert [one.teacher for one in stage.teachers] == [run.model.backbone.path]
    assert small.evaluation.baselines == (run.model.backbone.path,)
    own = run.stages[0].model_copy(update={"teachers": stage.teachers, "loss": stage.loss})
    kept = recovery(run.model_copy(update={"stages": (own,)}), "x", run.model.backbone.path, "cut")
    assert kept.stages[0] == own


def test_sizes_of_a_guarded_run_are_compared_on_own_data(run):
    guarded = override(run, ["evaluation.guard={}", "evaluation.benchmarks=[wikipedia]"])
    small = recovery(with_named_benchmarks(guarded), "x", run.model.backbone.path, "cut")
    assert (small.evaluation.own_sets, small.evaluation.guard) == ((), None)
    assert small.held_out_datasets


def test_the_family_stands_in_one_table_and_is_not_made_twice(run, monkeypatch):
    members = make_sizes(run, SIZES)
    assert [one.label for one in members] == ["all", "layers-0.4", "vocabulary-layers-2"]
    _, less, few = members
    figures = [one.made.figures for one in members]
    assert [one["layers"] for one in figures] == [3, 1, 2]
    tokens = [int(one["tokens"].replace(",", "")) for one in figures]
    assert tokens[2] < tokens[1] == tokens[0]
    assert figures[0]["M parameters"].value > figures[1]["M parameters"].value
    assert all(one.mean is not None for one in members)
    assert not less.made.figures["cut"].is_missing
    model = load_model(few.made.folder)
    assert len(model.backbone.layers) == 2
    folder = f"{run.placement.storage_path}/sizes/own"
    with Path(folder, "sizes.csv").open() as file:
        rows = list(csv.reader(file))
    assert [row[0] for row in rows[1:]] == [one.label for one in members]
    assert rows[1][-1] == "100.0%"

    def never(*_):
        raise AssertionError("a size was cut again")

    monkeypatch.setattr(Layers, "compress", never)
    # Whatever a table calls the models, whose labels are read by no one but people.
    monkeypatch.setattr(ScoreKey, "label", lambda key, stages: f"renamed {hash(key)}")
    again = make_sizes(run, SIZES)
    assert [(one.label, one.mean) for one in again] == [(o.label, o.mean) for o in members]
    cuts = [[one.made.figures["cut"] for one in found] for found in (members, again)]
    assert cuts[0] == cuts[1]


def test_what_cannot_be_made_is_refused_before_work(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sizes_module, "train", lambda run: pytest.fail("trained"))
    with pytest.raises(ConfigError, match="has 3 layers"):
        make_sizes(run, {**SIZES, "layers-9": (Layers(number=9),)})
    silent = override(run, ["data.datasets.pairs.held_out=null"])
    with pytest.raises(ConfigError, match="has no tasks to compare the sizes of the model by"):
        make_sizes(silent, SIZES)
    for words, told in (
        (["--size", "nothing"], "a size needs layers or vocabulary"),
        (["--size", "layers,share=0.5+magnitude"], "a size needs layers or vocabulary"),
        (["--size", "layers,0.5"], "is not a setting"),
        (["--size", "layers,share=0.5", "--size", "layers,share=0.5"], "two sizes"),
    ):
        assert run_sizes_job(words) == 2
        assert told in capsys.readouterr().err


def test_the_ways_that_make_a_size_are_listed(capsys):
    assert run_sizes_job(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == ["layers", "vocabulary"]
    for kind in COMPRESSIONS.classes():
        if kind not in listed:
            assert run_sizes_job(["--size", kind]) == 2


def test_a_registered_model_is_pinned_and_every_node_reads_its_version(run, tmp_path, monkeypatch):
    encoder, asked, trained = run.model.backbone.path, [], []

    def pinned(reference, tracking_uri):
        asked.append((reference, tracking_uri))
        return "models:/own/3"

    def training(small):
        trained.append(small)
        raise ConfigError("far enough")

    found = {"models:/own/3": Path(encoder)}
    monkeypatch.setattr(sizes_module, "pinned_reference", pinned)
    monkeypatch.setattr(sizes_module, "find_folder", lambda reference, _: found[reference])
    monkeypatch.setattr(sizes_module, "train", training)
    named = override(
        run,
        ["model.backbone.path=models:/own@champion", f"placement.storage_path={tmp_path}"],
    )
    with pytest.raises(ConfigError, match="far enough"):
        make_sizes(named, {"layers-0.4": SIZES["layers-0.4"]})
    assert asked == [("models:/own@champion", f"sqlite:///{tmp_path}/mlflow.db")]
    (small,), copy = trained, tmp_path / "sizes" / "own" / "own-3"
    assert small.evaluation.baselines == (str(copy),)
    assert [one.teacher for one in small.stages[0].teachers] == [str(copy)]
    assert weights_fingerprint(copy) == weights_fingerprint(Path(encoder))
    command = ["--model", "models:/own@champion", "--recipe", "biencoder-quickstart", "--dry-run"]
    assert run_sizes_job(command) == 0


def test_a_file_may_say_which_tokens_are_kept(run, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"text": "Paris is the capital"}) + "\n")
    (found,) = sizes_module._texts_of(run, str(path), ())
    assert found.text == "Paris is the capital"


def test_languages_of_the_training_data_say_which_tokens_are_kept(run, tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"query": f"{query} {n}", "positive": f"{positive} {n}", "language": language}
        for n in range(40)
        for query, positive, language in (
            ("capital", "Paris is the capital", "en"),
            ("capitale", "Paris est la capitale", "fr"),
            ("ciudad", "Lima es una ciudad", None),
        )
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = "data.datasets.pairs.source"
    many = override(run, [f"{source}.path={path}", f"{source}.language=language"])
    of_all = {one.text for one in sizes_module._texts_of(many, None, ())}
    french = {one.text for one in sizes_module._texts_of(many, None, ["fr"])}
    assert len(french) > 60
    assert french < of_all
    assert all("capitale" in text for text in french)
    with pytest.raises(ConfigError, match=r"--language de: .* fr \(36\)"):
        sizes_module._texts_of(many, None, ["fr", "de"])
    for words, told in (
        (["--size", "vocabulary", "--texts", str(path), "--language", "fr"], "only one of them"),
        (["--language", "fr"], "no --size reduces the vocabulary"),
    ):
        assert run_sizes_job(words) == 2
        assert told in capsys.readouterr().err
