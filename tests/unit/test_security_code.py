"""No code of ours unpickles what it did not pickle, or runs code that a model or data brings."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rayembed

PLATFORM = Path(rayembed.__file__).parents[1]
ROOT = PLATFORM.parent
FILES = sorted([*PLATFORM.rglob("*.py"), *(ROOT / "jobs").rglob("*.py")])

BETWEEN_WORKERS = {
    "rayembed/machine/ahead.py": {"answer", "made", "given.recv_bytes()", "work"},
    "rayembed/data/engine/on_ray.py": {"units", "row['result']"},
    "rayembed_extras/synthesis/on_ray.py": {"row['request']"},
}
"""Where pickles are read, and of what: rows of data sets that the same job has just put into Ray's
store, which itself pickles all that it moves, and what a process and those that it has started send
each other through pipes. Nothing of them comes from a file."""

CHECKED = {"rayembed/assets/arrow_files.py"}
"""Reads Parquet and Arrow files for all others, and looks at their types first."""

SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "_TextLoader"}

PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
READERS = {"load", "loads", "Unpickler", "open", "read_pickle"}


def forbidden(text: str) -> Iterator[str]:
    """Calls in a module's text by which data or a model could run code."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        owner, _, method = name.rpartition(".")
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        unpickles = owner.rpartition(".")[2] in PICKLES and method in READERS
        if unpickles or method == "read_pickle":
            yield f"{name} unpickles"
        if name in ("torch.load", "torch.hub.load") and given.get("weights_only") != "True":
            yield f"{name} without weights_only=True"
        # Not only True: a condition may be met by what a folder says of itself.
        for option in ("trust_remote_code", "allow_pickle"):
            if given.get(option, "False") != "False":
                yield f"{name}({option}={given[option]})"
        automatic = owner.rpartition(".")[2].startswith("Auto") and method.startswith("from_")
        if automatic and given.get("trust_remote_code") != "False":
            yield f"{name} may ask a terminal whether to run code"
        if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"):
            yield f"{name} runs text"
        if given.get("shell", "False") != "False":
            yield f"{name} through a shell"
        parquet = owner == "pq" and method in ("ParquetFile", "read_table", "ParquetDataset")
        if parquet or (owner.rpartition(".")[2] == "ipc" and method.startswith("open_")):
            yield f"{name} without a look at the columns' types; see assets/arrow_files.py"
        loader = given.get("Loader", "no loader")
        if name in ("yaml.load", "yaml.load_all") and loader not in SAFE_LOADERS:
            yield f"{name} with {loader}"
        if name in ("yaml.unsafe_load", "yaml.full_load"):
            yield f"{name} makes objects"


def imported_readers(text: str) -> Iterator[str]:
    """Names that stand for a reader of pickles without its module in front."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLES:
            yield from (alias.name for alias in node.names if alias.name in READERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_runs_what_it_reads(path):
    text = path.read_text(encoding="utf-8")
    inside = str(path.relative_to(PLATFORM)) if path.is_relative_to(PLATFORM) else ""
    found = [told for told in forbidden(text) if inside not in {*BETWEEN_WORKERS, *CHECKED}]
    assert found == []
    assert list(imported_readers(text)) == []


@pytest.mark.parametrize("name", [n for n in sorted(BETWEEN_WORKERS) if (PLATFORM / n).exists()])
def test_an_exception_reads_pickles_from_memory_and_nothing_else(name):
    text = (PLATFORM / name).read_text(encoding="utf-8")
    assert set(forbidden(text)) == {"pickle.loads unpickles"}
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    read = {ast.unparse(c.args[0]) for c in calls if ast.unparse(c.func) == "pickle.loads"}
    assert read == BETWEEN_WORKERS[name]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("pickle.load(file)", "unpickles"),
        ("ray.cloudpickle.loads(data)", "unpickles"),
        ("joblib.load(path)", "unpickles"),
        ("pandas.read_pickle(path)", "unpickles"),
        ("torch.load(path)", "without weights_only"),
        ("torch.load(path, weights_only=False)", "without weights_only"),
        ("AutoModel.from_pretrained(path, trust_remote_code=True)", "trust_remote_code=True"),
        ("SentenceTransformer(path, trust_remote_code=ours)", "trust_remote_code=ours"),
        ("transformers.AutoConfig.from_pretrained(path)", "may ask a terminal"),
        ("AutoModel.from_config(config)", "may ask a terminal"),
        ("np.load(path, allow_pickle=True)", "allow_pickle=True"),
        ("yaml.load(text)", "no loader"),
        ("yaml.load(text, Loader=yaml.Loader)", "yaml.Loader"),
        ("yaml.unsafe_load(text)", "makes objects"),
        ("eval(text)", "runs text"),
        ("subprocess.run(text, shell=True)", "through a shell"),
    ],
)
def test_each_forbidden_call_is_seen(line, told):
    assert [found for found in forbidden(line) if told in found]


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path, map_location='cpu', weights_only=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=False)",
        "np.load(path)",
        "np.savez(path, allow_pickle=False)",
        "json.load(file)",
        "safetensors.torch.load(data)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "model.eval()",
        "re.compile(text)",
    ],
)
def test_what_is_harmless_is_not_refused(line):
    assert list(forbidden(line)) == []


def test_a_reader_imported_by_name_is_seen():
    assert list(imported_readers("from pickle import loads, dumps")) == ["loads"]
    assert list(imported_readers("from pickle import UnpicklingError")) == []


def test_the_loader_of_settings_makes_no_objects():
    import yaml

    from rayembed.config.document import _TextLoader, read_yaml

    assert issubclass(_TextLoader, yaml.SafeLoader)
    with pytest.raises(yaml.YAMLError):
        read_yaml("!!python/object/apply:os.getcwd []")


def test_a_pickle_in_place_of_weights_or_vectors_is_not_run(tmp_path):
    """The controls of what the scan relies on: torch's flag and NumPy's own choice."""
    import pickle

    import numpy as np
    import torch

    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "was-run",))

    weights, vectors = tmp_path / "pytorch_model.bin", tmp_path / "vectors.npy"
    torch.save({"weight": Trap()}, weights)
    np.save(vectors, np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(weights, map_location="cpu", weights_only=True)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        np.load(vectors)
    assert not (tmp_path / "was-run").exists()
    torch.load(weights, weights_only=False)
    assert (tmp_path / "was-run").exists()
