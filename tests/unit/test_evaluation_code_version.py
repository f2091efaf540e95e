"""Other software, other results: nothing old is taken for new, and nothing old is touched."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
from made_up_articles import COUNT, run_over, write_articles
from run_scoring import evaluate
from table_model import TableModel, oracle
from tiny_folders import save_biencoder

from rayembed.config.document import fingerprint
from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.evaluation_run import EvaluationRun
from rayembed.config.graph import GraphConfig
from rayembed.config.settings import parse
from rayembed.errors import WorkerError
from rayembed.evaluation import code_version as scoring
from rayembed.evaluation import own_set, rayembed_spec
from rayembed.evaluation.code_version import code_of, code_version
from rayembed.evaluation.run_scores import make_spec
from rayembed.models import code_version as software
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.code_version import meaning
from rayembed.pipeline import evaluate as pipeline

REAL = software.version

SOURCE = '''
"""What it is."""
import torch


def pool(states, mask):
    """The mean."""
    return (states * mask).sum(1) / mask.sum(1)  # over the length
'''


@pytest.fixture
def installed(monkeypatch):
    """Sets the version of a package."""
    changed = {}
    monkeypatch.setattr(software, "version", lambda name: changed.get(name) or REAL(name))
    return changed


def test_what_is_said_of_code_does_not_count_and_what_it_does_counts():
    told = SOURCE.replace("The mean", "A mean of states").replace("over the", "of the true")
    told = told.replace("(states * mask)", "(\n        states * mask\n    )")
    assert told != SOURCE
    assert meaning(told) == meaning(SOURCE)
    for old, new in ((".sum(1) /", ".sum(0) /"), ("import torch", "import numpy"), ("mask)", "m)")):
        assert meaning(SOURCE.replace(old, new)) != meaning(SOURCE), new


def test_another_python_reads_the_same_source_as_the_same(monkeypatch):
    source = """
class Pool(Base, kind="mean"):
    width: int = 1

    async def mean(self, x, /, *more, key=None, **rest) -> "T":
        return f"{x!r:>{self.width}} {x=}" "of" f"{more}" if key is None else {**rest, 1: ...}


def stop():
    \"\"\"Nothing else.\"\"\"
    return
"""
    before = meaning(source)
    # Pinned: Python 3.11, 3.12 and 3.13 give it.
    assert fingerprint(before) == "14a306e64cf0"
    assert meaning(source.replace("    return\n", "    return None\n")) != before
    assert meaning(source.replace("{**rest, 1: ...}", "{1: ..., **rest}")) != before
    parse_here = ast.parse

    def parse_there(text):
        """As a Python whose functions and classes have a further field."""
        tree = parse_here(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                node._fields = (*node._fields, "newer")
                node.newer = []
        return tree

    monkeypatch.setattr(ast, "parse", parse_there)
    assert meaning(source) == before


@pytest.mark.parametrize(
    ("module", "vectors"),
    [
        ("models/pooling.py", True),
        ("evaluation/sentence_spec.py", True),
        ("search/exact.py", False),
        ("evaluation/prompts.py", False),
        ("evaluation/own_set.py", False),
        ("evaluation/own_data.py", False),
        ("evaluation/own_tables.py", False),
        ("evaluation/averages.py", False),
        ("evaluation/air_bench/scores.py", False),
        ("data/sources/rows.py", False),
    ],
)
def test_a_fix_in_a_checkout_is_another_version(module, vectors, monkeypatch):
    before = code_version()
    read = software.Path.read_text

    def fixed(path, encoding):
        text = read(path, encoding)
        return f"{text}\nFIXED = True\n" if path.as_posix().endswith(f"rayembed/{module}") else text

    software.source_version.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(software.Path, "read_text", fixed)
        after = code_version()
    software.source_version.cache_clear()
    assert after.scores != before.scores
    assert (after.vectors != before.vectors) == vectors
    assert code_version() == before


def test_libraries_count_and_the_hardware_that_they_are_built_for_does_not(installed):
    found = {code_version()}
    for name in ("rayembed", "tokenizers", "torch", "transformers"):
        installed[name] = "99.0"
        found.add(code_version())
    assert len({version.vectors for version in found}) == len(found) == 5
    installed["torch"] = "99.0+cu130"
    assert code_version() in found
    before = code_version()
    for name in ("mteb", "numpy", "scikit-learn", "scipy"):
        installed[name] = "99.0"
        assert code_version().vectors == before.vectors
        assert code_version().scores != before.scores
        del installed[name]
    assert code_version("sentence-transformers").vectors != before.vectors


ROOT = Path(software.__file__).parents[1]

OF_NO_VECTOR = {
    "assets/room.py",
    "ahead.py",
    "assets/cache.py",
    "assets/finite.py",
    "assets/names.py",
    "config/adaptation.py",
    "config/credentials.py",
    "config/document.py",
    "config/settings.py",
    "errors.py",
}
"""What models import of other rooms and no vector depends on."""

OF_NO_SCORE = {
    "assets",  # files as they lie
    "config",  # settings count by their values
    "data/exchange.py",
    "data/parts.py",  # records of training data
    "data/records.py",
    "data/shuffle.py",
    "data/sources/building.py",
    "data/sources/tasks.py",
    "data/work_items.py",
    "device.py",  # which device computes; the number type is settled by it elsewhere
    "errors.py",
    "evaluation/loader_code.py",  # refuses models
    "evaluation/prompts_table.py",  # shows prompts
    "registry",
    "progress.py",
    "quiet.py",
    "tables.py",
}
"""What those who take scores import and no score depends on."""


def imported(module):
    """Modules of rayembed that one names, anywhere in it, as paths below the package."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rayembed."):
            for name in node.names:
                places = (f"{node.module}.{name.name}", node.module)
                files = [ROOT.joinpath(*at.split(".")[1:]).with_suffix(".py") for at in places]
                found |= {next(f for f in files if f.is_file()).relative_to(ROOT).as_posix()}
    return found


def is_among(module, parts):
    return any(module == part or module.startswith(f"{part}/") for part in parts)


def closure(modules, without):
    """The modules and all that they import, but for what is left out and what only that imports."""
    seen, waiting = set(), set(modules)
    while waiting:
        module = waiting.pop()
        if module not in seen and not is_among(module, without):
            seen.add(module)
            waiting |= imported(module)
    return seen


def test_all_that_models_import_counts():
    models = {path.relative_to(ROOT).as_posix() for path in (ROOT / "models").rglob("*.py")}
    found = closure(models, OF_NO_VECTOR)
    assert {"config/pooling.py", "hardware.py"} <= found
    assert not {module for module in found if not is_among(module, software.FORWARD_PASS)}
    assert set().union(*map(imported, found)) >= OF_NO_VECTOR, "none is left out for nothing"


def test_all_that_takes_scores_counts():
    roots = {f"evaluation/{name}.py" for name in ("score", "run_scores", "own_set", "averages")}
    roots |= {"evaluation/air_bench/job.py"}
    counted = (*software.FORWARD_PASS, *scoring._SPECS, *scoring._SCORES)
    beside = ("evaluation/code_version.py", *OF_NO_SCORE)
    found = closure(roots, (*software.FORWARD_PASS, *beside))
    assert {"evaluation/own_data.py", "search/tiles.py", "quantisation.py"} <= found
    assert not {module for module in found if not is_among(module, counted)}
    # None is left out, and nothing counts, for nothing.
    named = set().union(*map(imported, found))
    assert not {part for part in OF_NO_SCORE if not any(is_among(m, [part]) for m in named)}
    assert not {part for part in scoring._SCORES if not (ROOT / part).exists()}


def test_what_was_read_of_an_own_set_is_read_again_by_other_code(asked, monkeypatch, tmp_path):
    run, _ = asked
    (own,) = run.own_sets
    first = own_set.retrieval_folders(own)["default"]
    own_set._written_set.cache_clear()
    assert own_set.retrieval_folders(own)["default"] == first
    monkeypatch.setattr(own_set, "readers_version", lambda: "other")
    own_set._written_set.cache_clear()
    assert own_set.retrieval_folders(own)["default"] != first
    own_set._written_set.cache_clear()


def test_what_unpacks_quantised_weights_counts(installed, tmp_path):
    folder = save_biencoder(tmp_path / "model")
    settings = ModelUnderTest(reference=str(folder))
    plain = make_spec(settings).code
    path = folder / "config.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps({**stated, "quantization_config": {"quant_method": "bitsandbytes"}}))
    assert make_spec(settings).code == plain
    method = {"quant_method": "compressed-tensors"}
    path.write_text(json.dumps({**stated, "quantization_config": method}))
    packed = make_spec(settings).code
    installed["compressed-tensors"] = "99.0"
    assert len({plain.vectors, packed.vectors, make_spec(settings).code.vectors}) == 3


def test_a_graphs_runtime_and_an_architecture_of_ones_own_count(installed, tmp_path, monkeypatch):
    config = parse(BiEncoderConfig, {"backbone": {"path": "given"}})
    graph = GraphConfig(runtime="onnx", precision="float32", file="graph.onnx")
    plain, traced = code_of(config, None), code_of(config, graph)
    assert plain == code_version()
    assert traced.vectors != plain.vectors
    installed["onnxruntime"] = "99.0"
    assert code_of(config, graph) != traced
    assert code_of(config, None) == plain
    place = tmp_path / "my_architecture.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    found = set()
    for width in (1, 2):
        place.write_text(f"WIDTH = {width}\n")
        software._foreign_source.cache_clear()
        own = type(
            "Own", (), {"__module__": "my_architecture", "architecture": "my_architecture:M"}
        )
        found.add(code_of(own(), None).vectors)
    software._foreign_source.cache_clear()
    assert len(found | {plain.vectors}) == 3


class Silent(TableModel):
    """A model that must not be asked."""

    def forward(self, batch, context=None):
        raise AssertionError("embedded although the scores were there")


def test_a_training_run_takes_its_scores_again_with_other_software(tmp_path, installed):
    run = run_over(write_articles(tmp_path / "articles.json"))
    options = {"name": "m", "revision": "abc", "results_folder": tmp_path}
    first = evaluate(oracle(), run, **options)
    silent = Silent(np.ones((COUNT, 4)))
    assert evaluate(silent, run, **options) == first, "the same software"
    before = contents(tmp_path / "results")
    installed["transformers"] = "99.0"
    with pytest.raises(WorkerError, match="embedded although"):
        evaluate(silent, run, **options)
    evaluate(oracle(), run, **options)
    after = contents(tmp_path / "results")
    assert {path: after[path] for path in before} == before
    revisions = {path.split("/")[1] for path in after}
    assert len(revisions) == 2
    assert all(revision.startswith("abc-") for revision in revisions)


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


def test_an_evaluation_keeps_old_results_with_the_software_that_made_them(
    asked, installed, tmp_path
):
    run, texts = asked
    results = tmp_path / "storage" / "evaluation" / "results"
    first = pipeline.evaluate(run)
    assert len(texts) == 4
    texts.clear()
    pipeline.evaluate(run)
    assert not texts, "the same software"
    before = contents(results)
    (told,) = [path for path in before if path.endswith("versions.yaml")]
    assert f"transformers: {REAL('transformers')}" in before[told].decode()

    installed["transformers"] = "99.0"
    second = pipeline.evaluate(run)
    assert len(texts) == 4, "neither scores nor embeddings of other software are taken"
    assert second.scored.meta.revision != first.scored.meta.revision
    assert (
        second.scored.meta.revision.partition("-")[0]
        == first.scored.meta.revision.partition("-")[0]
    )
    after = contents(results)
    assert {path: after[path] for path in before} == before
    (new,) = [path for path in set(after) - set(before) if path.endswith("versions.yaml")]
    assert "transformers: '99.0'" in after[new].decode()

    installed.clear()
    texts.clear()
    pipeline.evaluate(run)
    installed["mteb"] = "99.0"
    pipeline.evaluate(run)
    assert not texts, "another mteb scores the same vectors"
    assert contents(results)[told] == before[told]
    assert len([path for path in contents(results) if path.endswith("versions.yaml")]) == 3


def test_every_kind_of_spec_knows_its_software(tmp_path, installed):
    folder = save_biencoder(tmp_path / "model")
    references = (str(folder), f"st:{folder}", "mteb:intfloat/e5-base-v2")
    specs = [make_spec(ModelUnderTest(reference=reference)) for reference in references]
    installed["torch"] = "99.0"
    for reference, before in zip(references, specs, strict=True):
        after = make_spec(ModelUnderTest(reference=reference))
        assert after.fingerprint != before.fingerprint
        assert after.meta.revision != before.meta.revision
        assert after.meta.revision.rpartition("-")[0] == before.meta.revision.rpartition("-")[0]
