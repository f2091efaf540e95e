"""Noise behind texts: what is appended, and what stays as it was."""

import re

import pytest
from made_up_articles import COUNT, HELD_OUT, run_over, wikipedia_over, write_articles
from run_scoring import evaluate_reference, tasks_of
from tiny_models import metaspace_tokenizer, save_cde_stages, save_decoder, save_encoder

from rayembed.config.evaluation import Prompts
from rayembed.config.settings import parse
from rayembed.config.types import SHORT_NAMES
from rayembed.errors import ConfigError, DataError
from rayembed.evaluation import rayembed_spec
from rayembed.evaluation.plan import task_factories
from rayembed.evaluation.prompts import ModelPrompts, unsaved_prompts
from rayembed.models.causal2vec.config import Causal2VecConfig
from rayembed.models.cde.config import CDEConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model
from rayembed_extras.wikipedia_sample.files import held_out_articles
from rayembed_extras.wikipedia_sample.references import sizes_of
from rayembed_papers.noise import job as noise_job
from rayembed_papers.noise.job import _labelled
from rayembed_papers.noise.scores import (
    Noise,
    NoiseScores,
    NoisyTask,
    _make_room,
    _texts,
    _warn_of_cut_noise,
    noise_scores,
)

SIZES = {"documents": 30, "queries": 15, "max_length": 20}


@pytest.fixture
def run(tmp_path):
    return run_over(write_articles(tmp_path / "articles.json"), sampled=wikipedia_over, **SIZES)


def own_words(text):
    return {word for word in text.split() if word.startswith("own")}


def test_noise_is_words_of_articles_that_no_task_holds(run):
    noise = Noise.of(run, 8)
    assert len(noise.sources) == COUNT - HELD_OUT
    held_out = {
        word
        for a in held_out_articles(sizes_of(run.evaluation.own_sets))
        for word in own_words(a.extract)
    }
    texts = [a.extract for a in held_out_articles(sizes_of(run.evaluation.own_sets))]
    behind = [noise.behind(text) for text in texts]
    for text, noisy in zip(texts, behind, strict=True):
        assert noisy.startswith(f"{text} The sentence number 0 ")
        added = noisy.removeprefix(text)
        assert len(added.split()) == 8
        assert not own_words(added) & held_out
    assert behind == [Noise.of(run, 8).behind(text) for text in texts]
    assert len({noisy.removeprefix(text) for text, noisy in zip(texts, behind, strict=True)}) > 50
    with pytest.raises(DataError, match="none of them has 1000 words"):
        Noise.of(run, 1000)


def loaded(factory):
    task = factory.load()
    task.load_data()
    return task


def columns(task):
    """Texts of a task, and its other data."""
    texts, others = [], []
    for splits in task.dataset.values():
        tables = [splits]
        if not hasattr(splits, "column_names"):
            (part,) = splits.values()
            others.append(part["relevant_docs"])
            tables = [part["corpus"], part["queries"]]
        for table in tables:
            for name in table.column_names:
                kept = texts if name in ("text", "sentence1", "sentence2") else others
                kept += [list(table[name])]
    return texts, others


def test_every_text_gets_noise_and_nothing_else_changes(run):
    noise = Noise.of(run, 4)
    for factory in task_factories(run.scores):
        task, noisy = loaded(factory), loaded(NoisyTask(factory, noise))
        assert type(noisy) is type(task)
        assert noisy.metadata.dataset["revision"] != task.metadata.dataset["revision"]
        (texts, others), (found, same) = columns(task), columns(noisy)
        assert same == others
        assert sum(map(len, texts)) > 30
        assert found == [[noise.behind(text) for text in column] for column in texts]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    parts = {
        "backbone": save_decoder(folder / "llm", tokenizer=metaspace_tokenizer(add_bos=True)),
        "encoder": save_encoder(folder / "encoder"),
    }
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given", "max_length": 48},
        "query_max_length": 100,
        "document_max_length": 100,
    }
    build_model(parse(Causal2VecConfig, config), parts, seed=0).save(folder / "model")
    return folder / "model"


def test_each_task_is_scored_with_and_without_noise_and_once(run, saved, tmp_path, monkeypatch):
    encoded = []

    encode = rayembed_spec.encode
    monkeypatch.setattr(
        rayembed_spec, "encode", lambda m, t, **how: encoded.extend(t) or encode(m, t, **how)
    )
    options = {"name": "noise", "results_folder": tmp_path / "noise", "num_words": 8}
    scores = noise_scores(saved, run, **options)
    names = [task.metadata.name for task in tasks_of(run)]
    assert list(scores.clean) == list(scores.noisy) == names
    assert scores.clean != scores.noisy
    own = evaluate_reference(saved, run, name="own", results_folder=tmp_path / "own")
    assert scores.clean == pytest.approx(own, abs=1e-12), "no text is cut, so it is the same score"
    noise = Noise.of(run, 8)
    held_out = {
        word
        for a in held_out_articles(sizes_of(run.evaluation.own_sets))
        for word in own_words(a.extract)
    }
    noisy = [text for text in encoded if own_words(text) - held_out]
    clean = [text for text in encoded if not own_words(text) - held_out]
    assert {noise.behind(text) for text in clean} == set(noisy)
    encoded.clear()
    assert noise_scores(saved, run, **options) == scores
    assert not encoded


def test_noise_that_the_model_does_not_read_is_told(run, saved, caplog):
    model = load_model(saved)
    noise = Noise.of(run, 8)
    tasks = [NoisyTask(factory, noise) for factory in task_factories(run.scores)]
    bare = ModelPrompts(Prompts(table="none"), unsaved_prompts(model.config, {}))
    model.tokenizer.max_lengths = {"query": 1000, "document": 1000}
    _warn_of_cut_noise(model, "long", tasks, bare)
    assert not caplog.records
    lengths = [
        len(one["input_ids"])
        for task in map(loaded, tasks)
        for role, texts in _texts(task.dataset)
        for one in model.tokenizer(texts, role)
    ]
    median = sorted(lengths)[len(lengths) // 2]
    model.tokenizer.max_lengths = {"query": median, "document": median}
    _warn_of_cut_noise(model, "short", tasks, bare)
    (told,) = [r.getMessage() for r in caplog.records if "does not read all noise" in r.message]
    cut, number = map(int, re.findall(r"short: (\d+) of (\d+) texts", told)[0])
    assert number == len(lengths)
    assert cut == sum(length > median for length in lengths)


def test_what_the_model_cannot_read_is_refused(run, saved, tmp_path):
    with pytest.raises(
        ConfigError, match="the encoder would read 88 tokens, but it has learnt only 64"
    ):
        noise_scores(saved, run, name="x", results_folder=tmp_path, num_words=20)
    none = run.model_copy(update={"evaluation": run.evaluation.model_copy(update={"own_sets": ()})})
    with pytest.raises(ConfigError, match="no texts to append noise to"):
        noise_scores(saved, none, name="x", results_folder=tmp_path, num_words=4)


def test_the_job_prints_and_keeps_a_table(tmp_path, capsys, monkeypatch):
    asked = {}

    def measure(run, models, *, num_words):
        asked.update(models, words=num_words)
        clean = {"WikiSentenceRetrieval": 0.75, "WikiRelatednessSTS": 0.5}
        noisy = {"WikiSentenceRetrieval": 0.5, "WikiRelatednessSTS": 0.625}
        return dict.fromkeys(models, NoiseScores(clean, noisy))

    monkeypatch.setattr(noise_job, "measure", measure)
    storage = ["--set", f"placement.storage_path={tmp_path}"]
    assert noise_job.run_noise_job([*storage, "--words", "7"], about="") == 0
    folder = f"{tmp_path}/runs/causal2vec-quickstart/models/retrieval"
    assert asked["Causal2Vec"] == folder
    assert asked["last token"] == folder.replace("quickstart", "quickstart-last-token")
    assert asked["words"] == 7
    printed = capsys.readouterr().out
    assert "0.750 → 0.500 (-0.250)" in printed
    kept = (tmp_path / "noise" / "noise-7-words.md").read_text().splitlines()
    cell = "0.625 → 0.562 (-0.062)"
    assert kept[-1] == f"| mean | {cell} | {cell} |"
    assert noise_job.run_noise_job([*storage, "--model", "a=b=c"], about="") == 0
    assert asked["a"] == "b=c"
    assert noise_job.run_noise_job(["--model", "outputs/model"], about="") == 2
    assert "expected LABEL=REFERENCE" in capsys.readouterr().err


def test_both_stages_of_a_contextual_model_have_room_for_the_noise_once(run, tmp_path):
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given"},
        "num_context": 4,
        "query_max_length": 40,
        "document_max_length": 40,
    }
    model = build_model(parse(CDEConfig, config), save_cde_stages(tmp_path), seed=0)
    model.save(tmp_path / "model")
    options = {"name": "noise", "results_folder": tmp_path / "noise"}
    with pytest.raises(ConfigError, match="would read 70 tokens, but it has learnt only 64"):
        noise_scores(tmp_path / "model", run, num_words=15, **options)
    _make_room(model, 16)
    assert model.tokenizer.max_lengths == {"query": 56, "document": 56}


def test_a_short_name_is_taken_for_what_it_stands_for():
    short, meant = next(iter(SHORT_NAMES.items()))
    assert _labelled(f"ours={short}") == ("ours", meant)
