"""What a run of a reranker refuses before anything starts, and its recipe."""

import pytest

from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.records import Negative, Record
from rayembed.errors import ConfigError, DataError
from rayembed.pipeline.run.train import train as train_embedder
from rayembed.recipes.catalogue import get_recipe
from rayembed_extras.reranking.job import run_reranker_job
from rayembed_extras.reranking.objective import LISTS, make_list_batch
from rayembed_extras.reranking.train import train

NAMED = ["--pairs", "/data/pairs.jsonl", "--embedder", "/models/embedder"]


def test_pairs_and_the_embedder_are_settings_of_the_recipe():
    run, _ = run_reranker_job.resolve([*NAMED, "--set", "model.document_max_length=128"])
    (pairs,) = run.data.datasets
    assert (pairs.source.path, pairs.mining.teacher) == ("/data/pairs.jsonl", "/models/embedder")
    assert run.model.max_lengths == {"query": 128, "document": 128}
    assert not run.takes_scores
    assert run.stages[0].loss.kind == "listwise_softmax"


def test_another_architecture_is_another_jobs():
    with pytest.raises(ConfigError, match=r"only trains 'cross_encoder'.*rayembed train"):
        run_reranker_job.resolve(["--recipe", "biencoder-quickstart"])
    with pytest.raises(ConfigError, match="an embedding model; train it with rayembed train"):
        train(get_recipe("biencoder"))
    with pytest.raises(ConfigError, match="gives no vectors"):
        train_embedder(get_recipe("reranker"))


@pytest.mark.parametrize(
    "assignment",
    [
        "evaluation.guard={}",
        "evaluation.baselines=[bm25]",
        "evaluation.validation={data: {kind: held_out}}",
    ],
)
def test_scores_of_vectors_have_no_effect(assignment):
    with pytest.raises(ConfigError, match=r"has no effect.*gives no vectors"):
        override(get_recipe("reranker"), [assignment])


@pytest.mark.parametrize(
    "setting", ["query_instruction=Find it", "document_instruction=Read it", "source.instruction=i"]
)
def test_instructions_have_no_effect(setting):
    run = override(get_recipe("reranker"), [f"data.datasets.pairs.{setting}"])
    with pytest.raises(ConfigError, match="pairs has instructions, but a cross-encoder reads"):
        train(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {"kind": "infonce"}}, "kind is 'infonce', which compares vectors"),
        ({"batch.in_batch_negatives": True}, "in_batch_negatives has no effect"),
        ({"loss.dimensions": [8]}, "loss.dimensions has no effect"),
        ({"loss.precisions": ["int8"]}, "loss.precisions has no effect"),
        ({"query_max_length": 32}, "query_max_length has no effect"),
    ],
)
def test_a_stage_of_vectors_is_refused(changes, message):
    values = get_recipe("reranker").stages[0].model_dump(mode="json")
    LISTS.check(parse(StageConfig, values))
    for path, value in changes.items():
        *outer, last = path.split(".")
        inner = values
        for name in outer:
            inner = inner[name]
        inner[last] = value
    with pytest.raises(ConfigError, match=message):
        LISTS.check(parse(StageConfig, values))


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_stored_score_that_is_not_finite_is_refused(score):
    negatives = (Negative("b", score=0.1), Negative("c", score=score))
    record = Record("7", "q", ("a",), "pairs", negatives=negatives, positive_score=0.9)
    with pytest.raises(DataError, match=r"record '7' of 'pairs' has the stored scores"):
        make_list_batch(0, [record], 2, None)
