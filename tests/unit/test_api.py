"""rayembed in Python: the same run as the job's, from whatever holds the pairs."""

import json
import logging
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import datasets
import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from mlflow import MlflowClient
from own_pairs import UNGUARDED, write_pairs
from tiny_models import save_encoder

import rayembed
from rayembed.api import calls, measure, training
from rayembed.api.callbacks import Evaluate
from rayembed.api.calls import EncodingProgress
from rayembed.api.measure import _beir_folder
from rayembed.api.training import look_at
from rayembed.data.epochs import resolve
from rayembed.data.given_rows import rows_file, table_of_rows
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.display import progress as progress_lines
from rayembed.errors import ArtifactError, ConfigError, DataError, TrackingError
from rayembed.evaluation.own_data import find_files, write_set
from rayembed.losses.cosent import CoSENT
from rayembed.losses.infonce import InfoNCE
from rayembed.losses.siglip import SigLIP
from rayembed.pipeline.run.folders import plan_of
from rayembed.pipeline.run.training_job import training_job
from rayembed.registry.openai_schema import RequestError, read_texts
from rayembed.training.trainer import Callback

SHORT = {"model.query_max_length": 32, "model.document_max_length": 32}
FAST = {**SHORT, **UNGUARDED, "model.backbone.dtype": "float32", "evaluation.baselines": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    save_encoder(folder / "encoder")
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    return write_pairs(folder / "pairs.jsonl")


class Steps(Callback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, record):
        self.seen.append(record["step"])


@pytest.fixture(scope="module")
def trained(folder, rows):
    """A training of pairs in memory, and its callback."""
    steps = Steps()
    pairs = [(row["query"], row["positive"]) for row in rows]
    made = rayembed.train(
        folder / "encoder",
        pairs,
        epochs=3,
        batch_size=16,
        learning_rate=0.01,
        query_instruction="find",
        output=folder / "out",
        callbacks=[steps],
        settings=FAST,
    )
    return made, steps


def weights(place):
    return safetensors.torch.load_file(f"{place}/finetune/weights.safetensors")


def test_pairs_become_a_better_model_with_scores(trained):
    made, steps = trained
    scores = {name: row["pairs-held-out"] for name, row in made.scores.items()}
    assert scores["stage 1: finetune"] > scores["untrained"] + 0.1
    assert steps.seen == list(range(1, made.run.stages[0].steps + 1))
    plan = BatchPlan.open(plan_of(made.run, "finetune"))
    records = plan.manifest["datasets"]["pairs"]["rows"]
    assert records < 249 - 24, "copies are trained once"
    assert made.run.stages[0].steps == plan.num_steps == round(3 * records / 16)
    assert made.run.stages[0].epochs == 3
    # What was left open is settled: in the run, its file and MLflow.
    assert made.run.placement.use_gpu is torch.cuda.is_available()
    assert f"use_gpu: {str(torch.cuda.is_available()).lower()}" in made.run.to_yaml()
    assert made.version.startswith(f"models:/{made.run.name}/")
    assert "| stage 1: finetune |" in made._repr_markdown_()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_training_whose_last_update_diverges_leaves_no_model(folder, rows, steps):
    """No pass follows it: no step is dropped, or one, which its batch might be the reason of."""
    given = (folder / "encoder", folder / "pairs.jsonl")
    wide = {"output": folder / "diverged", "batch_size": 16, "steps": steps}
    unscored = {
        **{**FAST, "data.datasets.pairs.held_out": None},
        "stages.finetune.optimizer.warmup_steps": 0,
    }
    made = rayembed.train(
        *given, **wide, name=f"ordinary{steps}", learning_rate=1e-3, settings=unscored
    )
    assert made.version == f"models:/ordinary{steps}/1"
    with pytest.raises(ArtifactError, match=r"do not have length 1.*lower the learning rate"):
        rayembed.train(*given, **wide, name=f"wild{steps}", learning_rate=1e30, settings=unscored)
    run = folder / "diverged" / "runs" / f"wild{steps}"
    assert (run / "finetune" / "weights.safetensors").exists(), "it was trained to its end"
    assert not [path for path in run.glob("models/**/*") if path.is_file()]
    client = MlflowClient(f"sqlite:///{folder}/diverged/mlflow.db")
    assert not client.search_model_versions(f"name = 'wild{steps}'")


def test_one_text_is_one_vector(trained):
    model = trained[0].model
    one, several = model.encode("Paris bridge"), model.encode(["Paris bridge", "cats"])
    assert one.shape == (32,)
    np.testing.assert_allclose(several[0], one, atol=1e-6)
    assert model.similarity("cats", ["cats", "dogs"]).shape == (2,)
    query = model.encode_query("cats")
    assert not np.allclose(query, model.encode_document("cats")), "the instruction was learnt"
    np.testing.assert_allclose(model.encode("cats", role="query", instruction="find"), query)
    np.testing.assert_allclose(rayembed.encode(trained[0].folder, "cats", role="query"), query)


@pytest.mark.parametrize(
    ("texts", "role", "told"),
    [
        (["cats", None], "query", r"texts\[1\] is not a text but None"),
        ([3], "document", r"texts\[0\] is not a text but 3"),
        (3, "document", "texts = 3 is neither a text nor a list of texts"),
        ("cats", "quary", "role = 'quary': did you mean 'query'"),
    ],
)
def test_what_is_no_text_is_refused(trained, texts, role, told):
    with pytest.raises((ConfigError, DataError), match=told):
        trained[0].model.encode(texts, role=role)


@pytest.mark.parametrize("empty", ["", " \n", "\u200b", "\u0301\ufeff"])
def test_an_empty_text_is_named_or_allowed_by_the_servers_rule(trained, empty):
    """Each is refused by index, everywhere, or has the vector of special tokens everywhere."""
    made, _ = trained
    texts = ["cats", empty, "dogs"]
    with pytest.raises(DataError, match=r"1 of 3 texts .*texts\[1\].* allow_empty=True"):
        made.model.encode(texts)
    with pytest.raises(DataError, match=r"texts\[1\]"):
        rayembed.encode(made, texts)
    with pytest.raises(RequestError, match=r"input\[1\] is an empty text"):
        read_texts(texts)
    for call in (made.model.encode_query, made.model.encode_document, made.model.encode):
        vectors = call(texts, allow_empty=True)
        np.testing.assert_allclose(vectors[[0, 2]], call(["cats", "dogs"]), atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert (rayembed.encode(made, texts, allow_empty=True) == vectors).all()
    assert made.model.similarity("cats", texts, allow_empty=True).shape == (3,)


@pytest.mark.parametrize("short", [0.0, 60.0])
def test_a_long_call_of_encode_shows_its_progress(trained, monkeypatch, caplog, short):
    """And a short one nothing, nor does it start a thread."""
    monkeypatch.setattr(calls, "_SHORT_SECONDS", short)
    lines = []

    def told(what):
        lines.append(what)
        return nullcontext()

    monkeypatch.setattr(calls, "doing", told)
    with EncodingProgress() as progress:
        progress(512, 2048)
    trained[0].model.encode(["cats", "dogs", "cats"])
    assert len(lines) == (2 if short == 0 else 0)
    if lines:
        bar, number, rate, left = lines[0]().split("  ")[1:]
        assert (number, bar) == ("512/2,048", progress_lines.bar(1, 4))
        assert rate.endswith(" texts/s")
        assert left.endswith(" left")
        assert "2/2" in lines[1](), "distinct texts"


def test_what_was_trained_encodes_by_itself_and_from_its_registry(trained, folder):
    made, _ = trained
    expected = made.model.encode("cats live")
    assert (rayembed.encode(made, "cats live") == expected).all()
    assert made.folder in repr(made)
    output = made.run.placement.storage_path
    assert (rayembed.load(made.version, output=output).encode("cats live") == expected).all()
    with pytest.raises(ArtifactError, match=r"no registered model.*in MLflow at sqlite:.*output="):
        rayembed.load("models:/nothing/1", output=output)
    with pytest.raises(TrackingError, match=r"there is no MLflow database .*elsewhere"):
        rayembed.load(made.version, output=folder / "elsewhere")


def test_the_same_call_does_nothing_twice_and_a_job_gives_the_same_weights(
    trained, folder, rows, capsys
):
    made, _ = trained
    steps, pairs = Steps(), [(row["query"], row["positive"]) for row in rows]
    again = rayembed.train(
        folder / "encoder",
        pairs,
        epochs=3,
        batch_size=16,
        learning_rate=0.01,
        query_instruction="find",
        output=folder / "out",
        callbacks=[steps],
        settings=FAST,
    )
    assert again.folder == made.folder
    assert steps.seen == []
    settings = {
        **FAST,
        "data.datasets.pairs.source.path": folder / "pairs.jsonl",
        "data.datasets.pairs.query_instruction": "find",
        "model.backbone.path": folder / "encoder",
        "stages.finetune.batch.global_pairs": 16,
        "stages.finetune.steps": made.run.stages[0].steps,
        "stages.finetune.optimizer.learning_rate": 0.01,
        "placement.storage_path": folder / "job",
    }
    told = {path: "null" if value is None else value for path, value in settings.items()}
    words = [f"--set={path}={value}" for path, value in told.items()]
    assert training_job("biencoder")(["--name", "job", *words]) == 0
    by_job = weights(folder / "job" / "runs" / "job")
    for name, weight in weights(folder / "out" / "runs" / made.run.name).items():
        assert torch.equal(by_job[name], weight), name


def test_graded_pairs_are_trained_on_by_a_loss_over_such(folder, rows):
    pairs = [(row["query"], row["positive"], i % 5) for i, row in enumerate(rows[:80])]
    given = {"output": folder / "out", "settings": FAST}
    made = rayembed.train(folder / "encoder", pairs, steps=2, loss=CoSENT(scale=10.0), **given)
    assert made.run.stages[0].loss == CoSENT(scale=10.0)
    assert made.scores.keys() == {"untrained", "stage 1: finetune"}
    assert all(-1 <= row["pairs-held-out"] <= 1 for row in made.scores.values())


def test_mined_rows_are_trained_on_with_their_negatives(folder, rows):
    pairs = [(row["query"], row["positive"]) for row in rows[:60]]
    mined = rayembed.mine(pairs, teacher=folder / "encoder", num_negatives=2, output=folder / "out")
    assert {row["query"] for row in mined} <= {query for query, _ in pairs}
    positives = {positive for _, positive in pairs}
    assert any(row["negatives"] for row in mined)
    for row in mined:
        assert set(row["negatives"]) <= positives - {row["positive"]}
    run = _run_of(mined, folder)
    assert run.stages[0].batch.num_negatives == 2
    assert run.data.datasets[0].source.negatives == "negatives"


def test_mined_rows_have_all_their_positives(folder, rows):
    texts = [row["positive"] for row in rows[:60]]
    pairs = [
        {"query": row["query"], "positive": [texts[i], texts[-1 - i]] if i < 9 else [texts[i]]}
        for i, row in enumerate(rows[:30])
    ]
    mined = rayembed.mine(pairs, teacher=folder / "encoder", num_negatives=2, output=folder / "out")
    assert {row["query"]: row["positive"] for row in mined} == {
        row["query"]: row["positive"] for row in pairs
    }
    assert _run_of(mined, folder).data.datasets[0].source.negatives == "negatives"


def _run_of(pairs, folder, **given):
    """The run that `train` would do."""
    further = {"output": folder / "out", "settings": FAST, **given}
    with patch.object(training, "trained_by", lambda run, _: run):
        return resolve(rayembed.train(folder / "encoder", pairs, **further))


def test_settings_follow_the_number_of_rows(folder):
    many = [(f"query {i}", f"document {i}") for i in range(3000)]
    run = _run_of(many, folder)
    assert run.stages[0].steps == round(2700 / 64)
    assert run.stages[0].optimizer.warmup(run.stages[0].steps) == 4
    assert run.data.datasets[0].held_out.share == 0.1
    assert _run_of(many[:60], folder).data.datasets[0].held_out.share == 0.19
    few = _run_of(many[:20], folder)
    assert few.data.datasets[0].held_out is None
    assert few.stages[0].batch.global_pairs == 8
    assert _run_of(many, folder, steps=7).stages[0].steps == 7
    assert _run_of(many, folder, loss=InfoNCE(temperature=0.5)).stages[0].loss.temperature == 0.5
    with pytest.raises(ConfigError, match="give only one of them"):
        _run_of(many, folder, steps=7, epochs=1)
    with pytest.raises(ConfigError, match=r"finetune\.steps=5 and .*epochs=3 are both given"):
        _run_of(many, folder, epochs=3, settings={**FAST, "stages.finetune.steps": 5})


def test_pairs_that_grow_or_change_have_a_run_of_another_name(folder):
    rows, path = write_pairs(folder / "growing.jsonl", number=1000), folder / "growing.jsonl"
    run = _run_of(path, folder)
    write_pairs(path, number=3000)
    grown = _run_of(path, folder)
    changed_rows = [{**rows[0], "query": "another query"}, *rows[1:]]
    path.write_text("".join(json.dumps(row) + "\n" for row in changed_rows))
    changed = _run_of(path, folder)
    assert run.fingerprint == grown.fingerprint == changed.fingerprint, "else nothing is tested"
    assert len({one.name for one in (run, grown, changed)}) == 3
    write_pairs(path, number=1000)
    assert _run_of(path, folder).name == run.name
    assert run.name.startswith("pairs-")


def test_a_run_that_is_done_stays_when_its_name_is_used_for_other_rows(folder):
    pairs = folder / "changing.jsonl"
    write_pairs(pairs)
    given = {"steps": 1, "name": "done", "output": folder / "done", "settings": FAST}
    made = rayembed.train(folder / "encoder", pairs, **given)
    client = MlflowClient(f"sqlite:///{folder}/done/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name != "Default"]

    def kept():
        files = [path for path in (folder / "done" / "runs").rglob("*") if path.is_file()]
        (run,) = client.search_runs([experiment.experiment_id])
        return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in files}, run.to_dictionary()

    before = kept()
    assert before[1]["info"]["status"] == "FINISHED"
    write_pairs(pairs, number=300)
    with pytest.raises(
        ArtifactError, match=r"the run 'done' in .* has other data: .*put the files"
    ):
        rayembed.train(folder / "encoder", pairs, **given)
    assert kept() == before
    write_pairs(pairs)
    assert rayembed.train(folder / "encoder", pairs, **given).folder == made.folder


def test_a_set_in_memory_is_scored_as_one_on_disk(trained, folder, capsys):
    texts = {f"d{i}": f"{i} cats dogs river {i}" for i in range(12)}
    judged = {
        "queries": {"q1": "number 1 cats", "q2": "number 7 river"},
        "corpus": texts,
        "qrels": {"q1": {"d1": 1}, "q2": {"d7": 1}},
    }
    here = rayembed.evaluate(trained[0], judged, output=folder / "out")
    (place,) = (folder / "out" / "data" / "given").glob("set-*")
    assert rayembed.evaluate(trained[0].folder, place, output=folder / "out") == here
    capsys.readouterr()
    rows = rayembed.evaluate(trained[0], judged, baselines=True, output=folder / "out")
    ((task, score),) = here.items()
    assert set(rows) == {task, f"{task}, bm25", f"{task}, hybrid"}
    assert rows[task] == score
    assert rows[f"{task}, bm25"] > rows[f"{task}, hybrid"] > 0
    printed = capsys.readouterr().out
    assert "hybrid with BM25" in printed
    assert "Less the model" in printed
    with pytest.raises(
        DataError, match="an in-memory set must have the keys corpus, qrels, queries"
    ):
        rayembed.evaluate(trained[0], {"queries": {}}, output=folder / "out")


def of_sets(judged, folder):
    """Rows of the files that a set in memory is written to."""
    place = Path(measure._beir_folder(judged, str(folder)))
    names = ("corpus.jsonl", "queries.jsonl", "qrels/test.jsonl")
    return [[json.loads(line) for line in (place / n).read_text().splitlines()] for n in names]


def test_ids_and_grades_of_other_types_are_those_of_texts_and_whole_numbers(tmp_path):
    plain = {
        "queries": {"1": "one", "b": "two", "3": "three"},
        "corpus": {"1": "x", "c": "y", '\t"z': "w"},
        "qrels": {"1": {"1": 1, "c": 0}, "b": {'\t"z': 1, "c": 1}, "3": {"c": 2}},
    }
    wanted = of_sets(plain, tmp_path)
    others = {
        "queries": pd.Series({1: "one", "b": "two", np.int64(3): np.str_("three")}),
        "corpus": {np.int32(1): "x", "c": "y", '\t"z': "w"},
        "qrels": {
            1.0: {np.int64(1): True, "c": np.bool_(False)},
            "b": {"c", '\t"z'},
            3: pd.Series({"c": np.float32(2.0)}),
        },
    }
    assert of_sets(others, tmp_path) == [wanted[0], wanted[1], of_sets(others, tmp_path)[2]]
    triples = [
        {(row["query-id"], row["corpus-id"], row["score"]) for row in of_sets(one, tmp_path)[2]}
        for one in (plain, others)
    ]
    assert triples[0] == triples[1]
    for several in (["c", '\t"z'], ("c", '\t"z'), np.array(["c", '\t"z'])):
        assert of_sets({**others, "qrels": {**others["qrels"], "b": several}}, tmp_path) == of_sets(
            others, tmp_path
        )
    titled = {**plain, "corpus": {"1": {"title": "t", "text": "x"}, "c": "y"}}
    assert of_sets(titled, tmp_path)[0][0] == {"_id": "1", "title": "t", "text": "x"}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("queries", ["one"], r"queries of an in-memory set is \['one'\] \(list\)"),
        ("corpus", pd.DataFrame({"text": ["x"]}), r"(?s)corpus of an in-memory set is .*DataFrame"),
        ("corpus", {"d": 5.5}, r"corpus: 'd' of an in-memory set is 5.5; expected a text"),
        ("queries", {"q": None}, "queries: 'q' of an in-memory set is None"),
        ("queries", {("q",): "x"}, r"queries of an in-memory set has the id \('q',\)"),
        ("queries", {None: "x"}, "has the id None"),
        ("qrels", {"q": 1}, r"qrels of the query 'q' of an in-memory set is 1 \(int\)"),
        ("qrels", {"q": {"d": 0.5}}, "document 'd' has the grade 0.5; expected a whole number"),
        ("qrels", {"q": {"d": float("nan")}}, "has the grade nan"),
        ("qrels", {"q": {"d": 2**31}}, "has the grade 2147483648"),
        ("qrels", {"q": {"d": "high"}}, "has the grade 'high'"),
    ],
)
def test_sets_in_memory_of_other_forms_are_refused(tmp_path, part, value, message):
    judged = {"queries": {"q": "x"}, "corpus": {"d": "y"}, "qrels": {"q": {"d": 1}}}
    with pytest.raises(DataError, match=message):
        rayembed.evaluate("model", {**judged, part: value}, output=tmp_path)


ROWS = [{"query": "a", "positive": "b"}, {"query": "c", "positive": "d"}]


@pytest.mark.parametrize(
    "rows",
    [
        [("a", "b"), ("c", "d")],
        [["a", "b"], ["c", "d"]],
        ROWS,
        iter(ROWS),
        pd.DataFrame(ROWS),
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list([*ROWS, *ROWS]).select([0, 3]),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    ],
    ids=["tuples", "lists", "dicts", "iterator", "pandas", "dataset", "selected", "streamed"],
)
def test_pairs_in_memory_are_one_file_whatever_holds_them(rows, tmp_path):
    path = rows_file(rows, str(tmp_path))
    assert path == rows_file(ROWS, str(tmp_path))
    assert rows_file(ROWS[:1], str(tmp_path)) != path


def test_negatives_and_scores_of_tuples_have_their_columns():
    assert table_of_rows([("a", "b", "n", ["m", "o"])]).to_pylist() == [
        {"query": "a", "positive": "b", "negatives": ["n", "m", "o"]}
    ]
    assert table_of_rows([("a", "b", 3)]).to_pylist() == [
        {"sentence1": "a", "sentence2": "b", "score": 3.0}
    ]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "there are no rows"),
        (pd.DataFrame({"query": []}), "there are no rows"),
        (7, "rows must be a path, a DataFrame"),
        (["ab"], "row 0 is 'ab'; either all rows must be tuples"),
        ([("a", "b"), "cd"], "row 1 is 'cd'"),
        ([("a", "b"), ("c",)], r"row 1 is \('c',\), but it must be a tuple of 2 items"),
        ([("a", "b", 1), ("c", "d", "e")], r"must be \(text, text, score\)"),
        ([("a", "b"), ("c", 5j)], "row 1: positive is 5j, not a text"),
        ([("a", "b", 1j)], "negatives must be texts"),
        ([("a",), ("b",)], r"row 0 is \('a',\); a row must be \(query, positive\)"),
        ([("a", "b"), ("c", "\ud83d")], "row 1: 'positive' is .*half of a surrogate pair"),
        ([{"query": "a"}, {"query": 3}], "row 1: 'query' is 3, which does not go with the rows"),
        ([{"query": 1}, {"query": "two"}], "row 1: 'query' is 'two', which does not go"),
        ([{"query": "a"}, {"query": {"b", "c"}}], "row 1: 'query' is .*does not go"),
        ([{"query": 1j}], "row 0: 'query' is 1j, which is no text, number or list"),
        ([{"query": "a"}, {"n": ["x"]}, {"n": "y"}], "row 2: 'n' is 'y', which does not go"),
        ([{"query": 2**70}], "row 0: 'query' is 1180591620717411303424, which is no text"),
        ([{7: "a"}], "the column name 7 is not a string"),
        (pd.DataFrame({"query": ["a", "b", 3]}), "row 2: 'query' is 3, which does not go"),
        (
            pd.DataFrame({"query": ["a", "\ud83d"]}, dtype=object),
            "row 1: 'query' is .*half of a surrogate",
        ),
        (pd.DataFrame([["a", "b"]], columns=["q", "q"]), "two columns are named 'q'"),
        ([{"negatives": None}, {"negatives": "['a', 'b']"}], "row 1: the negatives .*json.loads"),
        (pd.DataFrame({"negatives": ['["a"]']}), "row 0: the negatives .*json.loads"),
        ({"query": ["a"]}, "rows must be a path, a DataFrame"),
    ],
)
def test_rows_that_are_not_alike_are_refused(rows, told):
    with pytest.raises(DataError, match=told):
        table_of_rows(rows)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"steps": 3, "epochs": 1}, "give only one of them"),
        ({"steps": 0}, r"steps = '?0'?: must be greater than 0"),
        ({"epochs": 0}, r"epochs = '?0'?: must be greater than 0"),
        ({"batch_size": 0}, r"global_pairs = '?0'?: must be greater than 0"),
        ({"batch_size": 600}, "global_pairs is 600.*fewer than one global batch"),
        ({"learning_rate": "fast"}, "learning_rate = 'fast': must be a valid number"),
        ({"workers": 0}, r"workers = '?0'?: must be greater than 0"),
        ({"loss": "infonse"}, "did you mean 'infonce'|must be one of.*'infonce'"),
        ({"loss": InfoNCE}, r"call it, as in InfoNCE\(\)"),
        ({"loss": 0.05}, "must be a loss of rayembed.losses"),
        ({"callbacks": [print]}, "is not a rayembed.training.trainer.Callback"),
        ({"settings": {"stages.finetune.step": 3}}, "did you mean 'steps'"),
    ],
)
def test_wrong_arguments_are_told_before_anything_starts(folder, arguments, told):
    output = folder / "wrong"
    rows = [(f"question {i}", f"answer {i}") for i in range(60)]
    lengths = {"model.query_max_length": 32, "model.document_max_length": 32}
    given = {"settings": lengths} | arguments
    with pytest.raises((ConfigError, DataError), match=told):
        rayembed.train(folder / "encoder", rows, output=output, **given)
    assert not (output / "runs").exists()


def test_a_loss_may_be_named(folder):
    path = str(folder / "named.jsonl")
    write_pairs(Path(path))
    named = _run_of(path, folder, loss="siglip")
    assert named.stages[0].loss == SigLIP()
    assert named.fingerprint == _run_of(path, folder, loss=SigLIP()).fingerprint


def test_wrong_columns_and_files_are_told_before_anything_starts(folder):
    given = {"output": folder / "bad", "settings": FAST}
    with pytest.raises(ConfigError, match="anchor"):
        rayembed.train(folder / "encoder", [{"anchor": "a", "positive": "b"}] * 60, **given)
    with pytest.raises(DataError, match=r"lost\.jsonl"):
        rayembed.train(folder / "encoder", "lost.jsonl", **given)
    assert not (folder / "bad" / "runs").exists() or not list((folder / "bad" / "runs").glob("*/"))


def test_the_import_is_light_and_knows_its_version():
    code = "import sys, rayembed; print(rayembed.__version__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    version, loaded = done.stdout.split()
    assert version[0].isdigit()
    assert loaded == "False"
    assert "train" in dir(rayembed)
    with pytest.raises(AttributeError, match="no attribute 'training_of'"):
        rayembed.training_of  # noqa: B018


def _metrics(made):
    lines = (Path(made.outcome.run_folder) / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, lines)}


def test_an_own_evaluator_is_logged_and_changes_no_weight(folder, rows):
    def evaluator(model, step):
        assert not model.training
        return {"random": torch.rand(()).item(), "step": step}

    pairs = [(row["query"], row["positive"]) for row in rows]
    given = {"steps": 4, "batch_size": 8, "settings": FAST}
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    logged, threads = list(logging.getLogger().handlers), torch.get_num_threads()
    plain = rayembed.train(folder / "encoder", pairs, output=folder / "plain", **given)
    told = rayembed.train(
        folder / "encoder",
        pairs,
        output=folder / "told",
        callbacks=[Evaluate(2, evaluator)],
        **given,
    )
    steps = _metrics(told)
    assert [step for step, line in steps.items() if "own/random" in line] == [2, 4]
    assert steps[4]["own/step"] == 4
    places = [made.outcome.run_folder for made in (plain, told)]
    for one, other in zip(*(weights(place).values() for place in places), strict=True):
        assert torch.equal(one, other)
    # Nothing of a training stays behind in the notebook's process.
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert logging.getLogger().handlers == logged
    assert not logging.getLogger("rayembed").handlers
    assert torch.get_num_threads() == threads


def test_an_evaluator_that_returns_no_number_is_refused(folder, rows):
    pairs = [(row["query"], row["positive"]) for row in rows]
    with pytest.raises(ConfigError, match=r"'score' = 'good', which is not a number"):
        rayembed.train(
            folder / "encoder",
            pairs,
            steps=2,
            output=folder / "refused",
            callbacks=[Evaluate(1, lambda model, step: {"score": "good"})],
            settings=FAST,
        )
    with pytest.raises(ConfigError, match="every_steps=0"):
        Evaluate(0, lambda model, step: {})


def test_numbers_count_as_texts_as_in_files():
    assert table_of_rows([(1, "b"), ("c", 2.5)]).to_pylist() == [
        {"query": "1", "positive": "b"},
        {"query": "c", "positive": "2.5"},
    ]


def test_rows_in_memory_have_every_column_that_any_row_has(tmp_path):
    rows = [
        {"query": "q0", "positive": "p0"},
        {"positive": "p1", "query": "q1", "negatives": ["n", "m"]},
        {"query": "q2", "positive": "p2", "meta": {"a": 1}},
        {"query": "q3", "positive": "p3", "meta": {"b": 2}},
    ]
    columns = {"query", "positive", "negatives", "meta"}
    streamed = datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"rows": rows})
    for given in (rows, iter(rows), pd.DataFrame(rows), streamed):
        table = table_of_rows(given)
        assert set(table.column_names) == columns
        assert table["negatives"].to_pylist() == [None, ["n", "m"], None, None]
    look = look_at(rows_file(rows, str(tmp_path)), delimiter=None, encoding=None)
    assert (look.columns, look.negatives) == (columns, 2)


def rows_of(rows):
    yield from rows


def test_negatives_that_begin_late_are_trained_with(folder):
    rows = [{"query": f"q {i}", "positive": f"p {i}"} for i in range(1200)]
    rows += [{"query": "q", "positive": "p", "negatives": ["n one", "m two"]}]
    run = _run_of(rows_file(rows, str(folder / "late")), folder)
    assert run.stages[0].batch.num_negatives == 2
    assert run.data.datasets[0].source.negatives == "negatives"


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ("qrels", {"q": {"d": 0.5}}, "qrels of the query 'q': the document 'd' has the grade 0.5"),
        ("qrels", {"q": {"d": 2**31}}, "expected a whole number"),
        ("corpus", ["a"], r"corpus of an in-memory set is \['a'\] \(list\); expected a dict"),
        ("corpus", {"d": None}, "corpus: 'd' of an in-memory set is None; expected a text"),
        ("corpus", {"d": "\ud83d"}, "expected a text of valid Unicode"),
        ("corpus", {1: "a", "1": "b"}, "corpus: '1' occurs 2 times"),
        ("qrels", {"q": ["d", "d"]}, "qrels/test: 'q' with 'd' occurs 2 times"),
        ("queries", {"\ud83d": "a"}, "queries of an in-memory set has the id"),
    ],
)
def test_sets_in_memory_that_are_none_are_told(part, value, told, tmp_path):
    good = {"queries": {"q": "a"}, "corpus": {"d": "b"}, "qrels": {"q": {"d": 1}}}
    with pytest.raises(DataError, match=told):
        _beir_folder({**good, part: value}, str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_sets_in_memory_may_have_numbers_of_numpy_and_series(tmp_path):
    plain = {
        "queries": {"1": "a"},
        "corpus": {"2": "b", "a\tb": "c"},
        "qrels": {"1": {"2": 1, "a\tb": 0}},
    }
    numbers = {
        "queries": pd.Series(["a"], index=np.array([1])),
        "corpus": {np.int64(2): "b", "a\tb": "c"},
        "qrels": {1: {np.int32(2): np.bool_(True), "a\tb": np.float32(0)}},
    }
    folder = _beir_folder(plain, str(tmp_path))
    assert _beir_folder(numbers, str(tmp_path)) == folder
    about = write_set(find_files(folder, "test"), tmp_path)
    assert (about.documents, about.queries, about.judgements) == (2, 1, 2)


def test_of_several_splits_one_must_be_named():
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"query": "a"}])})
    with pytest.raises(DataError, match=r"several splits \('train'\).*rows\['train'\]"):
        table_of_rows(splits)
