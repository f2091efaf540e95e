"""The Python of README and the guides: it parses, what it imports is there, and it runs."""

import ast
import copy
import functools
import importlib
import json
import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import build_site
import commands_reference
import mteb
import numpy as np
import openai
import pytest
import torch
from cluster_files import ROOT, fenced
from mlflow_uris import mlflow_at
from own_pairs import write_pairs
from pretended_gpu import pretended_gpu
from registered import register
from starlette.testclient import TestClient
from tiny_folders import save_biencoder, save_nvembed, save_tiny
from tiny_models import save_encoder

import rayembed
from rayembed.api import measure, training
from rayembed.api.training import Trained
from rayembed.config.data_run import DataRun
from rayembed.config.evaluation import EvaluationRun
from rayembed.config.override import assign_all
from rayembed.config.run import Run
from rayembed.config.types import SHORT_NAMES
from rayembed.errors import ConfigError
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.pipeline.evaluate import evaluate
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry.tracking import Tracker
from rayembed_extras.serving.app import make_app
from rayembed_extras.serving.service import EmbeddingService
from rayembed_papers.backbone.settings import BackboneRun

TEXTS = [f"{number} wonders of the ancient world" for number in range(40)]
NOT_OURS = {"langchain_huggingface", "llama_index", "my_package"}
"""Packages of a user."""

APPLIED = {
    "indexing": "unit/test_indexing_docs.py",
    "index_upgrades": "unit/test_index_upgrades_roads.py",
    "own_architecture": "unit/test_docs_own_architecture.py",
    "own_benchmark": "unit/test_docs_own_benchmark.py",
    "own_compression": "unit/test_compression_own_way.py",
    "own_data_step": "unit/test_docs_own_data_step.py",
    "own_job": "unit/test_docs_own_job.py",
    "own_loss": "unit/test_docs_own_loss.py",
    "own_source": "unit/test_docs_own_source.py",
    "own_training": "distributed/test_docs_own_training.py",
    "README": "unit/test_readme_python.py",
    "rerankers": "unit/test_reranking_docs.py",
    "stores": "unit/test_indexing_docs.py",
    "verification": "unit/test_verification_targets.py",
}
"""Page → the test that runs its Python."""


def python_of(page):
    """The Python blocks of a page."""
    return [text for language, text in fenced(page) if language in ("python", "py")]


PAGES = {
    page.stem: page
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"))
    if python_of(page) and page.stem not in APPLIED
}


def blocks_of(*names):
    """Parameters of a test, one for each block of the pages."""
    return [
        pytest.param(text, id=f"{name}-{number}")
        for name in names
        for number, text in enumerate(python_of(PAGES[name]))
    ]


class Runs:
    """Instead of trainings: the settings of each, and a model that is there."""

    def __init__(self, folder):
        self.folder, self.seen = folder, []

    def __call__(self, run, callbacks=()):
        for callback in callbacks:
            training._check_callback(callback)
        self.seen.append(run)
        version = SimpleNamespace(uri="models:/name/1")
        outcome = SimpleNamespace(model_folder=str(self.folder), table=None, version=version)
        return Trained(outcome)


def save_registered(folder, name):
    """Register a folder as candidate in the registry below `outputs`."""
    uri = f"sqlite:///{Path('outputs/mlflow.db').absolute()}"  # MLflow keeps engines by address
    tracker = Tracker.open(
        uri, "tests", "run", "0" * 12, {}, {}, folder=Path("outputs/runs/run"), total_steps=1
    )
    register(
        folder,
        name,
        tracker=tracker,
        weights_fingerprint="1" * 12,
        dimensions=(32,),
        instruction_template="Instruct: {instruction}\nQuery: ",
        global_step=1,
    )


def calls_of(page, *names):
    """Number of calls of functions of rayembed in a page's Python."""
    nodes = [node for text in python_of(page) for node in ast.walk(ast.parse(text))]
    called = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    return sum(called.count(f"rayembed.{name}") for name in names)


def test_every_page_with_python_is_run_by_a_test():
    tested = {
        page
        for page, test in APPLIED.items()
        if f"{page}.md" in (ROOT / "tests" / test).read_text()
    }
    assert tested == set(APPLIED)
    here = {"loading", "quickstart", "serving", "without_gpu", "cde", *TRAINING}
    assert set(PAGES) == here, "run the Python of a new page here, or name its test in APPLIED"


@pytest.mark.parametrize("text", blocks_of(*PAGES))
def test_what_a_block_imports_is_there(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules, names = [alias.name for alias in node.names], []
        elif isinstance(node, ast.ImportFrom):
            modules, names = [node.module], [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            if module.split(".")[0] not in NOT_OURS:
                found = importlib.import_module(module)
                assert [name for name in names if not hasattr(found, name)] == []


COMMAND = re.compile(r"`rayembed ([a-z][\w-]*)([^`\n]*)`")
OPTION = re.compile(r"--[a-z][\w-]*")


def test_commands_in_prose_are_those_of_the_reference():
    """Those in blocks are read by test_house_guides.py."""
    _, *parts = re.split(r"^### `rayembed ([\w-]+)`", commands_reference.page(), flags=re.MULTILINE)
    options = {
        name: set(OPTION.findall(text)) for name, text in zip(*[iter(parts)] * 2, strict=True)
    }
    pages = [path for pattern in build_site.PAGES for path in ROOT.glob(pattern)]
    texts = (re.sub("```.*?```", "", page.read_text(), flags=re.DOTALL) for page in pages)
    commands = [found for text in texts for found in COMMAND.findall(text)]
    assert len(commands) > 20
    assert {name for name, _ in commands} <= set(options)
    wrong = [one for one in commands if not set(OPTION.findall(one[1])) <= options[one[0]]]
    assert wrong == []


SETTING = re.compile(
    r"`(?:--set )?'?((?:data|evaluation|model|placement|stages)\.[\w.-]*\w)(?:=[^`\n]*)?`"
)
NO_SETTINGS = {
    "evaluation.yaml",  # a file
    "placement.on_gpu",  # of the code
    *("data.kind", "data.split"),  # below evaluation.validation
}


def test_settings_in_prose_are_those_of_a_recipe_or_a_job():
    """Those of commands in blocks are read by test_house_guides.py."""
    recipes = (
        "biencoder",
        "biencoder-corpus",
        "nvembed-v2-public",
        "nomic-v2-moe",
        "cde-small",
        "causal2vec-mistral-7b",
    )
    known = [(Run, get_recipe(name).model_dump(mode="json")) for name in recipes]
    known += [(EvaluationRun, {"model": {}}), (DataRun, {}), (BackboneRun, {})]
    named = {
        (page.name, path)
        for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("cluster/**/*.md"))
        if page.stem not in {*APPLIED} - {"README"}  # settings of their own
        for path in SETTING.findall(re.sub("```.*?```", "", page.read_text(), flags=re.DOTALL))
    }
    assert len(named) > 100

    def there(kind, values, path):
        names = {"stages": "stages.finetune", "data.datasets": "data.datasets.pairs"}
        path = re.sub(r"^(stages|data\.datasets)\.[A-Z]\w*", lambda found: names[found[1]], path)
        try:
            assign_all(kind, copy.deepcopy(values), [f"{path}=null"])
        except ConfigError:
            return False
        return True

    missing = {
        (page, path)
        for page, path in named
        if path not in NO_SETTINGS and not any(there(*one, path) for one in known)
    }
    assert missing == set()


TRAINING = ("python", "documents")


@pytest.mark.parametrize("page", TRAINING)
def test_calls_of_a_page_make_runs(page, tmp_path, monkeypatch):
    """All but the training itself, whose settings are those of the call."""
    monkeypatch.chdir(tmp_path)
    encoder = save_encoder(tmp_path / "encoder")
    monkeypatch.setitem(SHORT_NAMES, "all-MiniLM-L6-v2", str(encoder))
    runs = Runs(save_biencoder(tmp_path / "model"))
    monkeypatch.setattr(training, "trained_by", runs)
    monkeypatch.setattr(measure, "trained_by", runs)
    scored = []
    of_own_set = evaluate.evaluate

    def scores(run):
        scored.append(run)
        if run.own_sets:
            return of_own_set(run)
        evaluate.task_factories(run)
        return SimpleNamespace(failed=[], scored=SimpleNamespace(scores={}, further={}))

    monkeypatch.setattr(evaluate, "evaluate", scores)
    pairs = [(row["query"], row["positive"]) for row in write_pairs(tmp_path / "pairs.jsonl", 60)]
    names = {"rayembed": rayembed, "pairs": pairs, "documents": TEXTS, "my_score": len}
    if calls_of(PAGES[page], "load"):
        save_registered(runs.folder, "support")
    Path("judged/qrels").mkdir(parents=True)
    for name, row in (
        ("corpus", {"_id": "d", "text": "cats"}),
        ("queries", {"_id": "q", "text": "dogs"}),
        ("qrels/test", {"query-id": "q", "corpus-id": "d", "score": 1}),
    ):
        Path("judged", f"{name}.jsonl").write_text(json.dumps(row))
    for text in python_of(PAGES[page]):
        exec(text, names)
    assert len(runs.seen) == calls_of(PAGES[page], "train", "adapt") > 0
    assert len(scored) == calls_of(PAGES[page], "evaluate")
    if page == "python":
        assert 8 in [run.placement.workers for run in runs.seen]
        assert {tuple(row) for row in names["rows"]} == {("query", "positive", "negatives")}
        assert {own.name for run in scored for own in run.own_sets} > {"judged"}


@pytest.mark.parametrize("text", blocks_of("loading"))
@pytest.mark.parametrize("save", [save_nvembed, save_biencoder])
def test_a_model_loads_as_the_page_says(text, save, tmp_path, monkeypatch):
    for package in ("langchain_huggingface", "llama_index.embeddings.huggingface"):
        if package in text:
            pytest.importorskip(package)
    from sentence_transformers import SentenceTransformer

    import rayembed.models.sentence_module  # noqa: F401

    folder = str(save(tmp_path / "model"))
    asked = []
    monkeypatch.setattr(mteb, "evaluate", lambda model, tasks: asked.append((model, tasks)))
    names = {
        "folder": folder,
        "model": SentenceTransformer(folder, device="cpu"),
        "SentenceTransformer": functools.partial(SentenceTransformer, device="cpu"),
        "documents": TEXTS,
        "queries": ["7 wonders", "12 wonders"],
    }
    given = dict(names)
    exec(text, names)
    ours = load_model(folder)
    if "index" in names:
        vectors = encode(ours, TEXTS, role="document")
        found = encode(ours, given["queries"], role="query") @ vectors.T
        best = np.sort(found, axis=1)[:, ::-1][:, :10]
        np.testing.assert_allclose(names["scores"], best, atol=1e-5)
    elif "many" in names:
        np.testing.assert_allclose(names["one"], encode(ours, "capital of Peru", role="query"))
        assert names["many"].shape == (2, *names["one"].shape)
    elif "mteb" in names:
        ((_, tasks),) = asked
        assert [task.metadata.name for task in tasks] == ["SciFact"]
    elif "embeddings" not in names:
        wanted = encode(ours, ["capital of Peru"], role="query")
        np.testing.assert_allclose(names["queries"], wanted, atol=1e-5)
        assert names["documents"].shape == wanted.shape


def test_the_quickstarts_model_is_used_in_two_ways_with_equal_vectors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("outputs/runs/nvembed-quickstart/models/blend")
    folder.parent.mkdir(parents=True)
    save_registered(save_nvembed(folder), "nvembed-quickstart")
    names = {}
    with mlflow_at(None):
        for text in python_of(PAGES["quickstart"]):
            exec(text.replace("sqlite:///", f"sqlite:///{tmp_path}/"), names)
    (answered,) = names["answer"]["data"]
    np.testing.assert_allclose(answered["embedding"], names["queries"][0], atol=1e-5)


def test_a_contextual_model_embeds_queries_with_its_corpus(tmp_path):
    folder = save_tiny("cde", tmp_path / "model")
    names = {"folder": folder, "documents": TEXTS}
    (text,) = python_of(PAGES["cde"])
    exec(text, names)
    np.testing.assert_allclose(np.linalg.norm(names["queries"], axis=1), 1, atol=1e-5)


def test_a_pretended_gpu_takes_a_model(monkeypatch):
    model = torch.nn.Linear(2, 2)
    names = {"pretended_gpu": pretended_gpu, "monkeypatch": monkeypatch, "model": model}
    for text in python_of(PAGES["without_gpu"]):
        exec(text, names)


def test_openais_client_gets_what_the_page_of_serving_asks_for(tmp_path, monkeypatch):
    config = BiEncoderConfig(backbone={"path": "given", "dtype": "float32"})
    model = build_model(config, save_encoder(tmp_path / "encoder", hidden_size=256), seed=0)
    service = EmbeddingService("name", model)
    with ExitStack() as opened:
        client = opened.enter_context(TestClient(make_app({"name": service}, service.limits)))
        monkeypatch.setattr(openai, "OpenAI", functools.partial(openai.OpenAI, http_client=client))
        names = {"texts": TEXTS, "numpy": np}
        for text in python_of(PAGES["serving"]):
            exec(text, names)

        def vectors(role, texts, kind):
            ask = {"model": f"name:{role}", "input": texts, "encoding_format": kind}
            found = names["client"].embeddings.create(**ask).data
            return np.array([item.embedding for item in found])

        stored = vectors("document", TEXTS, "ubinary").astype(np.uint8)
        (query,) = vectors("query", ["what do foxes eat"], "float")
    assert stored.shape == (len(TEXTS), 32)
    int8 = np.round(127 * encode(model, TEXTS, role="document")).astype(np.int8)
    assert len(names["search"](query, stored, int8)) == 10
