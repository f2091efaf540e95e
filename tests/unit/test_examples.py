"""Notebooks of examples/: valid, run, without traces of a machine; `make slow` runs them whole."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from notebooks import executed

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
LARGEST = 400_000
"""Bytes of a notebook."""

MOST_WARNED = 500
"""Characters on standard error of a cell, which are warnings of rayembed."""

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
MACHINES = re.compile(
    r"(?<![\w/.])/(?:tmp|root|home|work|usr|opt|var|mnt|Users)/|\b\d\d:\d\d:\d\d  "
)
"""Paths of a machine, and times of day as in logs."""

SHOWN = {
    "own_pairs": (r"trained: own [+-]", r"\| BM25 \|", r"models:/articles/2"),
    "documents_without_labels": (r"corpus-held-out", r"trained: own [+-]", r"a mined negative"),
    "evaluate_and_serve": (
        r"^Champion +version 1",
        r"model in Python: \d\.\de-\d\d",
        r"^nDCG@10 of the retriever (0\.\d{4}), of the evaluation \1",
    ),
    "hard_negatives": (r"^negative ", r"distilled +0\.\d", r"teacher +0\.\d"),
    "several_workers": (r"one and two workers: \d\.\de-\d\d", r"another seed: \d\.\de-\d\d"),
}
"""Notebook → what its outputs have."""


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts_of(notebook):
    """All texts of the outputs, without colours."""
    texts = []
    for output in (output for cell in code_of(notebook) for output in cell.outputs):
        data = output.get("data", {"text/plain": output.get("text", "")})
        texts += [text for kind, text in data.items() if kind.startswith("text/")]
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(texts))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_as_it_ran_from_top_to_bottom(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert path.stat().st_size <= LARGEST
    code = code_of(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        ast.parse(cell.source)
        assert all(output.output_type != "error" for output in cell.outputs)
        warned = [output.text for output in cell.outputs if output.get("name") == "stderr"]
        assert len("".join(warned)) <= MOST_WARNED, "a library floods it"
        *_, last = ast.parse(cell.source).body
        if isinstance(last, ast.Expr) and not cell.source.rstrip().endswith(";"):
            assert cell.outputs, cell.source
    texts = texts_of(notebook)
    assert MACHINES.search(path.read_text()) is None
    for pattern in SHOWN[path.stem]:
        assert re.search(pattern, texts, re.MULTILINE), pattern


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_says_first_what_one_learns_and_last_what_to_read(path):
    cells = nbformat.read(path, 4).cells
    assert re.search(r"You learn .*minutes? on two cores", cells[0].source, re.DOTALL)
    assert cells[-1].source.startswith("## Next")
    links = [
        link for cell in cells if cell.cell_type == "markdown" for link in LINK.findall(cell.source)
    ]
    assert links
    for link in links:
        assert (EXAMPLES / link).exists(), link


def test_the_readme_lists_every_notebook():
    listed = set(re.findall(r"\]\((\w+)\.ipynb\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.stem for path in NOTEBOOKS} == set(SHOWN)


@pytest.mark.slow("runs the notebooks whole, minutes each")
@pytest.mark.job
@pytest.mark.ray
@pytest.mark.assets
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_whole(path, tmp_path):
    """In a folder of its own; scores are those of a machine, so that only their names are held."""
    texts = texts_of(executed(path, tmp_path))
    for pattern in SHOWN[path.stem]:
        assert re.search(pattern, texts, re.MULTILINE), pattern
