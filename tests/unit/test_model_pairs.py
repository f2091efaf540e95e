"""Pairs of models: references, scores by hand, what does not fit, a run's report, the recipe."""

import json
import math
import pickle
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import mteb
import numpy as np
import own_pairs
import pytest
from beir_set import write_beir
from corpus_adaptation import write_corpus
from mteb.types import PromptType
from own_pairs import own_run
from sentence_transformers import SentenceTransformer
from tiny_folders import save_biencoder, save_tiny
from tiny_models import save_encoder

from rayembed.config.evaluation import EvaluationRun, ModelUnderTest
from rayembed.config.override import override
from rayembed.config.own_sets import RetrievalSet
from rayembed.config.settings import parse
from rayembed.errors import AssetError, ConfigError
from rayembed.evaluation.own_set import OwnTask
from rayembed.evaluation.pooled.here import run_here
from rayembed.evaluation.run_scores import make_spec
from rayembed.evaluation.score import Store, score
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.pipeline.evaluate.evaluate import evaluate, with_findings
from rayembed.pipeline.run.train import train
from rayembed.recipes.catalogue import get_recipe
from rayembed.results.scores import BM25_ROW, HYBRID
from rayembed_extras.model_pairs.finding import CURVE
from rayembed_extras.model_pairs.loader import parse_pair
from rayembed_extras.model_pairs.pair_spec import pair_of

WORDS = own_pairs.WORDS.split()
DOCUMENTS = {f"d{i}": f"{WORDS[i % 12]} {WORDS[i % 7]} {WORDS[i % 5]} {i}" for i in range(40)}
QUERIES = {f"q{i}": f"{WORDS[(3 * i) % 12]} {WORDS[i % 7]}" for i in range(12)}
JUDGED = {f"q{i}": {f"d{(5 * i) % 40}": 1, f"d{(7 * i + 1) % 40}": 1} for i in range(12)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tiny bi-encoders with prompts of their own, and a retrieval set."""
    folder = tmp_path_factory.mktemp("pairs")
    save_biencoder(folder / "first", seed=1)
    save_biencoder(folder / "second", seed=5, query_prefix="fox ", document_prefix="Paris ")
    write_beir(folder / "set", DOCUMENTS, QUERIES, JUDGED)
    return folder


def reference(folder, first="first", second="second"):
    return f"pair:{folder / first}::{folder / second}"


def spec_of(name, **settings):
    return make_spec(ModelUnderTest(reference=str(name), **settings), on="cpu")


def scores_of(folder, spec, place):
    task = OwnTask(RetrievalSet(name="planted", path=str(folder / "set")))
    scored = score(spec, [task], partial(run_here, device="cpu"), Store(str(place)))
    assert not scored.failed
    return scored


@pytest.mark.parametrize(
    "name",
    [
        "models:/support@candidate::models:/support@champion",
        "all-MiniLM-L6-v2::hf://org/large@main",
        "st:/a/b::s3://bucket/model",
    ],
)
def test_a_reference_survives_shells_settings_and_files(name, tmp_path):
    pair = f"pair:{name}"
    assert shlex.quote(pair) == pair
    run = parse(EvaluationRun, {"model": {"reference": pair}, "tasks": ["SciFact"]})
    assert override(run, [f"model.reference={pair}"]) == run
    path = tmp_path / "run.yaml"
    path.write_text(run.to_yaml())
    assert EvaluationRun.read(path).model.reference == pair
    assert "::".join(parse_pair(pair)) == name


@pytest.mark.parametrize(
    "name", ["pair:a", "pair:::b", "pair:a::", "pair:a::b::c", "pair:pair:a::b"]
)
def test_a_reference_that_names_no_two_models_is_refused(name):
    with pytest.raises(ConfigError, match=r"write pair:QUERIES::DOCUMENTS"):
        spec_of(name)


def ndcg(queries, documents):
    """Mean nDCG@10 of cosines, by the formula."""
    found = []
    for query, vector in zip(QUERIES, queries, strict=True):
        cosines = dict(zip(DOCUMENTS, documents @ vector, strict=True))
        best = sorted(cosines, key=cosines.get, reverse=True)[:10]
        gained = [
            JUDGED[query].get(name, 0) / math.log2(rank + 2) for rank, name in enumerate(best)
        ]
        found.append(sum(gained) / sum(1 / math.log2(rank + 2) for rank in range(2)))
    return float(np.mean(found))


def test_the_scores_are_those_of_both_models_vectors(folder, tmp_path):
    spec = pickle.loads(pickle.dumps(spec_of(reference(folder), dtype="float32")))
    first, second = (
        SentenceTransformer(str(folder / name), device="cpu") for name in ("first", "second")
    )
    texts = list(DOCUMENTS.values())
    expected = ndcg(first.encode_query(list(QUERIES.values())), second.encode_document(texts))
    scored = scores_of(folder, spec, tmp_path)
    assert scored.scores["planted"] == pytest.approx(expected, abs=1e-4)
    assert scored.meta.name == "rayembed/first--second"
    alone = ndcg(first.encode_query(list(QUERIES.values())), first.encode_document(texts))
    assert abs(expected - alone) > 1e-3, "the control, one model for both"
    prompts = (scored.local / "prompts.yaml").read_text()
    assert "where " in prompts
    assert "Paris " in prompts
    same = scores_of(folder, spec_of(reference(folder, second="first")), tmp_path)
    assert same.scores["planted"] == pytest.approx(alone, abs=1e-4)
    assert same.meta.revision != scored.meta.revision


def test_each_side_has_its_prompt_and_symmetric_texts_are_queries(folder):
    spec = spec_of(reference(folder))
    task, alike = mteb.get_task("SciFact").metadata, mteb.get_task("STS12").metadata
    for metadata, side, prompt in (
        (task, PromptType.query, "where "),
        (task, PromptType.document, "Paris "),
        (alike, None, "where "),
    ):
        assert spec.shown(spec.encode_spec(metadata, side)) == prompt
    first = spec_of(folder / "first")
    texts = ["cats live in Paris", "a fox"]
    found = spec.load("cpu")(texts, spec.encode_spec(alike, None))
    np.testing.assert_array_equal(found, first.load("cpu")(texts, first.encode_spec(alike, None)))
    given = spec_of(reference(folder), prompts={"document_prefix": "dogs ", "query_prefix": ""})
    assert given.shown(given.encode_spec(task, PromptType.query)) == ""
    assert given.shown(given.encode_spec(task, PromptType.document)) == "dogs "


def test_a_wider_query_model_is_cut_where_it_has_learnt_it(folder):
    narrow = save_biencoder(folder / "narrow", width=16)
    learnt = save_tiny("nomic-moe", folder / "learnt")
    spec = spec_of(f"pair:{learnt}::{narrow}")
    metadata = mteb.get_task("SciFact").metadata
    encode_spec = spec.encode_spec(metadata, PromptType.query)
    found = spec.load("cpu")(["a fox"], encode_spec)
    whole = spec_of(learnt)
    vector = whole.load("cpu")(["a fox"], whole.encode_spec(metadata, PromptType.query))[:, :16]
    np.testing.assert_allclose(found, vector / np.linalg.norm(vector), atol=1e-6)
    for one, other in (("first", narrow), (narrow, "first")):
        with pytest.raises(ConfigError, match=r"vectors have (32|16) dimensions and .* (16|32)"):
            spec_of(f"pair:{folder / one}::{folder / other}")
    told = spec_of(f"pair:{folder / 'first'}::{narrow}", dimensions=16)
    assert told.queries.dimensions == told.documents.dimensions == 16
    assert pair_of(spec_of(folder / "first"), spec_of(narrow), learnt=(16,)) == replace(
        told, documents=spec_of(narrow)
    )


def test_models_of_other_libraries_are_compared_when_they_have_embedded(folder, tmp_path):
    narrow = save_biencoder(folder / "narrow", width=16)
    same = spec_of(f"pair:st:{folder / 'first'}::{folder / 'second'}")
    own = spec_of(reference(folder))
    expected = scores_of(folder, own, tmp_path).scores["planted"]
    assert scores_of(folder, same, tmp_path).scores["planted"] == pytest.approx(expected, abs=1e-4)
    wrong = spec_of(f"pair:st:{folder / 'first'}::{narrow}")
    task = OwnTask(RetrievalSet(name="planted", path=str(folder / "set")))
    scored = score(wrong, [task], partial(run_here, device="cpu"), Store(str(tmp_path)))
    assert "query model's vectors have 32 dimensions" in str(scored.failed[0][1])


def test_what_is_no_pair_is_refused(folder):
    with pytest.raises(ConfigError, match="bm25 has no vectors"):
        spec_of(f"pair:bm25::{folder / 'second'}")
    with pytest.raises(ConfigError, match=r"revision = 'main' would be that of one model"):
        spec_of(reference(folder), revision="main")
    with pytest.raises(AssetError, match="no file or folder"):
        spec_of(reference(folder, second="none"))
    contextual = save_tiny("cde", folder / "cde")
    with pytest.raises(ConfigError, match=r"a task's corpus.*set model\.context=none"):
        spec_of(f"pair:{contextual}::{folder / 'first'}")


def test_the_evaluation_takes_a_pair_with_its_rows(folder, tmp_path):
    run = parse(
        EvaluationRun,
        {
            "model": {"reference": reference(folder), "dtype": "float32"},
            "own_sets": [{"name": "planted", "path": str(folder / "set")}],
            "placement": {"storage_path": str(tmp_path), "runtime": "local"},
        },
    )
    evaluated = with_findings(evaluate(run))
    assert not evaluated.failed
    alone = scores_of(folder, spec_of(reference(folder), dtype="float32"), tmp_path / "other")
    assert evaluated.scored.scores == alone.scores
    assert set(evaluated.scored.further) >= {BM25_ROW, HYBRID}
    assert not any("failed" in line for finding in evaluated.findings for line in finding.lines)


STEPS = (
    "placement.runtime=local",
    "placement.findings=[old_index]",
    "evaluation.baselines=[]",
    "stages.finetune.epochs=null",
    "stages.finetune.steps=4",
)


def test_the_report_shows_what_the_old_index_gives(tmp_path):
    run = own_run(
        tmp_path,
        *STEPS,
        f"stages.finetune.compatible_with={tmp_path / 'encoder'}",
    )
    outcome = train(run)
    (finding,) = outcome.findings
    rows = finding.table.rows
    assert [row[:2] for row in rows] == [
        ["old model", "old model"],
        ["this model", "this model"],
        ["this model", "old model"],
    ]
    assert rows[0][3] == ""
    assert all("95 %" in row[3] for row in rows[1:])
    (task,) = outcome.trained.scores
    own = [one for one in outcome.trained.tasks if one.name == task]
    new, old = spec_of(outcome.model_folder), spec_of(tmp_path / "encoder")
    pool, place = partial(run_here, device="cpu"), Store(str(tmp_path / "again"))
    pair = score(pair_of(new, old), [own[0].factory], pool, place)
    assert finding.metrics[CURVE] == {task: pytest.approx(pair.scores[task], abs=1e-6)}
    assert rows[1][2].value == pytest.approx(outcome.trained.scores[task], abs=1e-4)
    assert "% of the score with all documents embedded again" in finding.lines[0]
    plain = train(own_run(tmp_path, *STEPS, "name=plain"))
    assert plain.findings == ()


def test_the_recipe_trains_a_query_encoder_for_a_larger_model(tmp_path):
    large = save_encoder(tmp_path / "large", seed=3, hidden_size=64)
    small = save_encoder(tmp_path / "small")
    write_corpus(tmp_path / "corpus.jsonl")
    settings = {
        "data.datasets.corpus.source.path": tmp_path / "corpus.jsonl",
        "model.backbone.path": small,
        "model.backbone.dtype": "float32",
        "model.query_max_length": 32,
        "model.document_max_length": 32,
        "stages.distil.compatible_with": large,
        "stages.distil.batch.global_pairs": 8,
        "stages.distil.optimizer.learning_rate": 0.01,
        "stages.distil.epochs": "null",
        "stages.distil.steps": 20,
        "placement.storage_path": tmp_path / "outputs",
        "placement.runtime": "local",
        "placement.findings": "[old_index]",
        "evaluation.baselines": "[]",
    }
    recipe = get_recipe("query-encoder")
    with pytest.raises(ConfigError, match=r"768 dimensions and those .* 64"):
        train(override(recipe, [f"{path}={value}" for path, value in settings.items()]))
    settings["model.projections.0.width"] = 64
    given = [f"{path}={value}" for path, value in settings.items()]
    outcome = train(override(recipe, given))
    modules = json.loads(Path(outcome.model_folder, "modules.json").read_text())
    names = [module["type"] for module in modules]
    assert any(name.endswith("Dense") for name in names)
    texts = [f"Number {i} has cats and dogs" for i in range(30)]
    wanted = encode(load_model(large), texts, role="query")
    plain = SentenceTransformer(outcome.model_folder, device="cpu")
    before = encode(load_model(f"{outcome.run_folder}/models/untrained"), texts, role="query")
    cosine = float((plain.encode(texts, normalize_embeddings=True) * wanted).sum(axis=1).mean())
    assert cosine > float((before * wanted).sum(axis=1).mean()) + 0.3
    rows = outcome.findings[0].table.rows
    assert [row[1] for row in rows] == ["old model", "this model", "old model"]
