"""What scores and embeddings are found by: weights, settings and two numbers, never the code."""

import json
import sys

import pytest
from made_up_articles import run_over, write_articles
from run_scoring import evaluate, tasks_of
from table_model import oracle
from tiny_folders import save_biencoder

from rayembed.config.evaluation import EvaluationRun, ModelUnderTest
from rayembed.config.mining import Teacher
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.vectors.embed import vectors_of
from rayembed.evaluation import own_set, rayembed_spec
from rayembed.evaluation.run_scores import bm25_revision, decided, make_spec, run_prompts
from rayembed.models import versions
from rayembed.pipeline.evaluate import evaluate as pipeline

OPENED: list[list[str]] = []


def _keep_opened(event, arguments):
    if event == "open" and OPENED:
        OPENED[-1].append(str(arguments[0]))


@pytest.fixture(scope="module")
def opened():
    """Collects the paths of opened files in its last list, while it has one."""
    sys.addaudithook(_keep_opened)
    return OPENED


@pytest.fixture
def installed(monkeypatch):
    """Sets the version of a package, as in a process of its own."""
    changed, real = {}, versions.version
    monkeypatch.setattr(versions, "version", lambda name: changed.get(name) or real(name))
    monkeypatch.setattr(versions, "_warned", set())
    return changed


def spec_of(folder):
    return make_spec(ModelUnderTest(reference=str(folder)))


def test_no_name_reads_source(tmp_path, opened):
    folder = save_biencoder(tmp_path / "model")
    run = run_over(write_articles(tmp_path / "articles.json"))
    teacher = Teacher(teacher=str(folder), dtype="float32")

    def names():
        spec = spec_of(folder)
        vectors = vectors_of(PipelineContext(str(tmp_path), 0), teacher).folder
        return [
            spec.meta.revision,
            spec.fingerprint,
            vectors,
            bm25_revision(),
            decided(tasks_of(run), run_prompts(run)),
        ]

    first = names()  # what is imported later reads source, too
    opened.append([])
    assert names() == first
    read = opened.pop()
    assert any(path.endswith("config.json") for path in read), "control: reading is seen"
    assert not [path for path in read if path.endswith((".py", ".pyc"))]


@pytest.mark.parametrize("number", ["VECTORS", "SCORES"])
def test_a_spec_is_named_by_the_numbers(number, tmp_path, monkeypatch):
    folder = save_biencoder(tmp_path / "model")
    spec = spec_of(folder)
    vectors, revision = spec.fingerprint, spec.meta.revision
    monkeypatch.setattr(rayembed_spec, number, "raised")
    spec = spec_of(folder)
    assert (spec.fingerprint != vectors) == (number == "VECTORS")
    assert spec.meta.revision != revision
    assert spec.meta.revision.rpartition("-")[0] == revision.rpartition("-")[0]


def test_versions_of_libraries_are_recorded_and_name_nothing(tmp_path, installed):
    folder = save_biencoder(tmp_path / "model")
    before = spec_of(folder)
    before = before.fingerprint, before.meta.revision
    installed |= {"torch": "99.0+cu130", "openvino": ""}
    after = spec_of(folder)
    assert (after.fingerprint, after.meta.revision) == before
    assert versions.versions()["torch"] == "99.0", "without the hardware that it is built for"


def test_an_uninstalled_package_is_neither_recorded_nor_warned_of(monkeypatch, caplog):
    def version(name):
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", version)
    assert versions.versions() == {}
    versions.warn_of_other_versions("vectors", {"torch": "1.0"})
    assert not caplog.messages


def contents(folder):
    """Of all visible files, by their paths."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name[0] != "."]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """An evaluation of a tiny model on an own set without Ray, and the texts that it embeds."""
    folder = save_biencoder(tmp_path / "model")
    documents = [{"_id": f"d{i}", "text": text} for i, text in enumerate(["foxes", "dogs", "7"])]
    own = tmp_path / "own"
    (own / "qrels").mkdir(parents=True)
    (own / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (own / "queries.jsonl").write_text(json.dumps({"_id": "q", "text": "cats or dogs"}))
    (own / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td1\t1")
    texts = []
    encode = rayembed_spec.encode
    monkeypatch.setattr(
        rayembed_spec, "encode", lambda m, t, **options: texts.extend(t) or encode(m, t, **options)
    )
    values = {
        "model": {"reference": str(folder)},
        "own_sets": [{"name": "own", "path": str(own)}],
        "placement": {"storage_path": str(tmp_path / "storage")},
    }
    return parse(EvaluationRun, values), texts


def test_an_evaluation_with_other_libraries_is_one_warning_and_takes_nothing_again(
    asked, installed, tmp_path, caplog
):
    run, texts = asked
    results = tmp_path / "storage" / "evaluation" / "results"
    first = pipeline.evaluate(run)
    assert len(texts) == 4
    texts.clear()
    before = contents(results)
    (told,) = [path for path in before if path.endswith("versions.yaml") and "bm25" not in path]
    was = versions.versions()["transformers"]
    assert f"transformers: {was}" in before[told].decode()
    installed |= {"transformers": "99.0", "mteb": "99.0"}
    second = pipeline.evaluate(run)
    assert not texts
    assert second.scored.meta.revision == first.scored.meta.revision
    assert contents(results) == before
    (warned,) = [message for message in caplog.messages if "other library versions" in message]
    assert f"; transformers {was}, here 99.0) and are used unchanged" in warned


def test_a_raised_number_takes_scores_or_embeddings_again_and_keeps_the_former(
    asked, tmp_path, monkeypatch
):
    run, texts = asked
    results = tmp_path / "storage" / "evaluation" / "results"
    pipeline.evaluate(run)
    before = contents(results)
    texts.clear()
    monkeypatch.setattr("rayembed.evaluation.rayembed_spec.SCORES", "raised")
    pipeline.evaluate(run)
    assert not texts, "the kept embeddings are those of now"
    monkeypatch.setattr("rayembed.evaluation.rayembed_spec.VECTORS", "raised")
    pipeline.evaluate(run)
    assert len(texts) == 4
    after = contents(results)
    assert {path: after[path] for path in before} == before
    kept = [path.split("/")[0] for path in after if path.endswith("versions.yaml")]
    rows = {row: sum(name.endswith(row) for name in kept) for row in ("BM25", "hybrid")}
    assert rows == {"BM25": 1, "hybrid": 3}, "BM25 depends on neither model nor vectors"
    assert len(kept) == 1 + 3 + 3


def test_an_own_set_is_read_again_under_a_raised_number_of_scores(asked, monkeypatch):
    run, _ = asked
    (own,) = run.own_sets
    first = own_set.retrieval_folders(own)["default"]
    own_set._written_set.cache_clear()
    assert own_set.retrieval_folders(own)["default"] == first
    monkeypatch.setattr(own_set, "SCORES", "raised")
    own_set._written_set.cache_clear()
    assert own_set.retrieval_folders(own)["default"] != first
    own_set._written_set.cache_clear()


def test_a_training_run_keeps_its_scores_with_other_libraries(tmp_path, installed, caplog):
    run = run_over(write_articles(tmp_path / "articles.json"))
    options = {"name": "m", "revision": "abc", "results_folder": tmp_path}
    first = evaluate(oracle(), run, **options)
    before = contents(tmp_path / "results")
    installed["transformers"] = "99.0"
    assert evaluate(oracle(), run, **options) == first
    assert contents(tmp_path / "results") == before
    assert len([message for message in caplog.messages if "other library versions" in message]) == 1
