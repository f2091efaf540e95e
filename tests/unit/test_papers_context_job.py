"""The analysis job: what it refuses before it begins, what it writes and says."""

import csv
import io

import pytest
from made_up_articles import wikipedia_over
from tiny_models import save_cde_stages, save_encoder
from word_articles import run_over_words, write_word_articles

from rayembed.config.settings import parse
from rayembed.data.engine import on_ray as data_on_ray
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.cde.config import CDEConfig
from rayembed.models.loading.build import build_model
from rayembed.pipeline.run import on_ray
from rayembed_papers import measure_on_ray as evaluation_on_ray
from rayembed_papers.context.difficulty import Difficulty
from rayembed_papers.context.job import default_sizes, requested_sizes, run_context_job
from rayembed_papers.context.report import (
    deliver,
    difficulty_report,
    size_report,
    topic_report,
)
from rayembed_papers.context.topics import EVERY_TOPIC, NO_CONTEXT, TopicScores

PNG = b"\x89PNG\r\n"


def batches(*means):
    return Difficulty(means, tuple(mean - 0.1 for mean in means), (0.25,) * len(means))


DIFFICULTIES = {
    16: {4: batches(0.5, 0.7), 8: batches(0.4)},
    64: {4: batches(0.3), 8: batches(0.2)},
    None: {4: batches(0.1), 8: batches(0.1)},
}
SIZES = {
    0: {"WikiSentenceRetrieval": [0.5], "WikiDescriptionRetrieval": [0.25]},
    8: {"WikiSentenceRetrieval": [0.75, 0.8], "WikiDescriptionRetrieval": [0.5, 0.55]},
    16: {"WikiSentenceRetrieval": [0.7, 0.7], "WikiDescriptionRetrieval": [0.5, 0.5]},
}
TOPICS = TopicScores(
    "WikiSentenceRetrieval",
    {
        "Arts": {"Arts": (0.8,), "Places": (0.6,), EVERY_TOPIC: (0.7,), NO_CONTEXT: (0.5,)},
        "Places": {"Arts": (0.9,), "Places": (0.4,), EVERY_TOPIC: (0.7,), NO_CONTEXT: (0.5,)},
    },
)


def delivered(report, folder):
    out = io.StringIO()
    deliver(report, str(folder), out)
    assert (folder / "plot.png").read_bytes().startswith(PNG)
    text = (folder / "table.md").read_text()
    assert text.endswith(f"\n{report.sentence}\n")
    lines = out.getvalue().splitlines()
    assert lines[-1] == report.sentence, "the last line says what came out"
    assert str(folder / "plot.png") in lines[-2]
    with (folder / "table.csv").open(newline="") as file:
        return text, list(csv.DictReader(file)), out.getvalue()


def test_difficulty_is_told_with_random_batches_beside_it(tmp_path):
    text, rows, printed = delivered(difficulty_report(DIFFICULTIES), tmp_path)
    line = "| 16 | 4 | 2 | 0.6000 | 0.1000 | 0.5000 | 25.00% |"
    assert line in text
    assert len(rows) == 6
    assert rows[-1]["pairs of a cluster"] == "random"
    assert "0.6000" in printed
    said = "4 pairs with clusters of 16 (mean cosine 0.600, 0.100 in random order), of 8 pairs with"
    assert f"Hardest are batches of {said} clusters of 16 (mean cosine 0.400, 0.100" in printed
    turned = {16: DIFFICULTIES[64], 64: DIFFICULTIES[16], None: DIFFICULTIES[None]}
    assert "4 pairs with clusters of 64" in difficulty_report(turned).sentence


def test_sizes_are_told_with_their_spread(tmp_path):
    text, rows, printed = delivered(size_report(SIZES), tmp_path)
    assert "| 8 | 0.775 ± 0.035 | 0.525 ± 0.035 | 0.650 ± 0.035 |" in text
    assert len(rows) == 10
    said = "0.375 with 0 context documents and 0.600 ± 0.000 with 16 (+0.225)"
    assert f"The mean score is {said}; it is highest with 8." in printed
    one = {size: {"A": scores["WikiSentenceRetrieval"]} for size, scores in SIZES.items()}
    assert size_report(one).sentence.startswith("The score is 0.500 with 0")


def test_topics_are_told_with_what_is_near_the_best(tmp_path):
    text, rows, printed = delivered(topic_report(TOPICS), tmp_path)
    assert "| Arts | **0.800** | 0.600 | 0.700 | 0.500 |" in text
    assert "| Places | **0.900** | 0.400 | 0.700 | 0.500 |" in text
    assert "90.0*" in printed
    assert len(rows) == 8
    assert "for 1 of 2 topics. Mean score with them 0.600, with another topic's 0.750" in printed
    assert "with all topics' 0.700, without context 0.500." in printed


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="choose another --output"):
        deliver(size_report(SIZES), str(tmp_path / "file" / "below"), io.StringIO())


def test_sizes_are_those_that_fit_the_data():
    assert requested_sizes(None, None, {"a": 1000, "b": 300}, 10_000) == ([8, 16, 32, 64], [16, 64])
    assert requested_sizes([64, 2, 2], [300], {"b": 300}, 10_000) == ([2, 64], [300])
    with pytest.raises(
        ConfigError, match=r"--cluster-sizes 301 is more than the 300 pairs of .*'b'"
    ):
        requested_sizes([8, 301], None, {"a": 1000, "b": 300}, 10_000)
    with pytest.raises(ConfigError, match=r"--batch-sizes 64 is more than the 50 pairs .* --pairs"):
        requested_sizes(None, [64], {"b": 300}, 50)
    with pytest.raises(ConfigError, match="too few"):
        requested_sizes(None, None, {"b": 20}, 1000)
    assert default_sizes(32) == [0, 1, 2, 4, 8, 16, 32]
    assert default_sizes(5) == [0, 1, 2, 4, 5]
    assert default_sizes(1) == [0, 1]


@pytest.fixture
def no_cluster(monkeypatch):
    """Work that would begin on a cluster fails the test."""

    def connect():
        raise AssertionError("work began")

    monkeypatch.setattr(on_ray, "connect", connect)


def asked(tmp_path, analysis, *more):
    run = run_over_words(write_word_articles(tmp_path / "articles.json"), sampled=wikipedia_over)
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    recipe = ["--recipe", str(tmp_path / "run.yaml")]
    storage = ["--set", f"placement.storage_path={tmp_path}/out"]
    return [analysis, *recipe, *storage, *more]


def save_model(folder, stages, num_context):
    lengths = {"query_max_length": 62, "document_max_length": 62}
    config = {"backbone": {"path": "given", "dtype": "float32"}, "encoder": {"path": "given"}}
    model = build_model(
        parse(CDEConfig, config | lengths | {"num_context": num_context}), stages, seed=0
    )
    model.save(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A CDE of four context documents, an encoder, a folder of something else, its stages."""
    place = tmp_path_factory.mktemp("models")
    save_encoder(place / "encoder")
    (place / "empty").mkdir()
    save_model(place / "cde", save_cde_stages(place), 4)
    return place


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("sizes", "--model", "{}/encoder"), 1, "has no context; use a CDE model"),
        (("topics", "--model", "{}/encoder"), 1, "has no context; use a CDE model"),
        (("topics", "--model", "{}/empty"), 1, "neither config.json nor modules.json"),
        (("sizes",), 1, "runs/test/models/one"),
        (("sizes", "--model", "{}/cde", "--sizes", "0,9"), 2, "9 context documents were requested"),
        (("sizes", "--model", "{}/cde", "--tasks", "WikiSenten"), 2, "no retrieval task"),
        (("topics", "--model", "{}/cde", "--task", "x"), 2, "no retrieval task 'x'"),
        (("batches",), 2, "data.datasets.wiki.clusters is null"),
        (("batches", "--datasets", "wikki"), 2, "did you mean 'wiki'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_work_begins(
    tmp_path, folders, no_cluster, capsys, arguments, code, message
):
    filled = [argument.format(folders) for argument in arguments]
    assert run_context_job(asked(tmp_path, *filled), about=None) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("sizes", "--sizes", "0,-1"),
        ("sizes", "--tasks", ","),
        ("topics", "--draws", "0"),
        ("batches", "--batch-sizes", "1"),
        (),
    ],
)
def test_wrong_numbers_are_refused_by_the_parser(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        run_context_job(arguments, about=None)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_batches_of_made_up_articles_are_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(on_ray, "connect", lambda: None)
    monkeypatch.setattr(
        data_on_ray,
        "ray_pipeline_context",
        lambda run: PipelineContext(run.placement.storage_path, run.seed, root=run.data.root),
    )
    save_encoder(tmp_path / "teacher")
    clusters = f"{{teacher: {tmp_path}/teacher, batch_pairs: 8, restarts: 1, iterations: 5}}"
    arguments = asked(tmp_path, "batches", "--set", f"data.datasets.wiki.clusters={clusters}")
    assert run_context_job([*arguments, "--output", str(tmp_path / "told")], about=None) == 0
    printed = capsys.readouterr().out
    assert "Hardest are batches of 16 pairs with clusters of" in printed
    with (tmp_path / "told" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["pairs of a cluster"] for row in rows] == ["8", "16", "random"]
    assert float(rows[0]["mean cosine"]) > float(rows[-1]["mean cosine"])
    assert run_context_job([*arguments, "--cluster-sizes", "999"], about=None) == 2
    assert "--cluster-sizes 999 is more than the" in capsys.readouterr().err


@pytest.mark.parametrize(("analysis", "made"), [("sizes", SIZES), ("topics", TOPICS)])
def test_a_trained_model_is_analysed_on_the_cluster(
    tmp_path, folders, monkeypatch, capsys, analysis, made
):
    handed = {}

    def measured(measure, reference, run, **options):
        handed.update(options, measure=measure.__name__, reference=reference)
        return made

    monkeypatch.setattr(on_ray, "connect", lambda: None)
    monkeypatch.setattr(evaluation_on_ray, "measured_on_ray", measured)
    folder = tmp_path / "out" / "runs" / "test" / "models" / "one"
    save_model(folder, {"backbone": folders / "second", "encoder": folders / "first"}, 6)
    assert run_context_job(asked(tmp_path, analysis), about=None) == 0
    assert handed["reference"] == str(folder)
    assert handed["results_folder"] == f"{tmp_path}/out/analysis"
    assert handed["draws"] == 3
    if analysis == "sizes":
        assert handed["sizes"] == [0, 1, 2, 4, 6]
    assert (tmp_path / "out" / "analysis" / analysis / "plot.png").exists()
    assert "ean score" in capsys.readouterr().out
