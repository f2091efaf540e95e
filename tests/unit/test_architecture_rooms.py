"""Only its own folder knows an architecture."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import grimp
import pytest

import rayembed
from rayembed.config.model import ARCHITECTURES
from rayembed.config.settings import kind_of

ROOT = Path(rayembed.__file__).parent
CLASSES = {
    kind: cls
    for kind, cls in ARCHITECTURES.classes().items()
    if cls.__module__.startswith("rayembed.")
}
FOLDERS = sorted({Path(*cls.__module__.split(".")[1:-1]) for cls in CLASSES.values()})
MAY_KNOW = (
    "recipes",
    "samples",
    *map(str, FOLDERS),
    # The table, and the published prompts by the name of their paper.
    "config/model.py",
    "config/evaluation.py",
    "evaluation/prompts.py",
)


@cache
def own_names() -> set[str]:
    """Settings and model classes of all architectures."""
    named = {cls.__name__ for cls in CLASSES.values()}
    for folder in FOLDERS:
        for path in (ROOT / folder).glob("*.py"):
            tree = ast.parse(path.read_text())
            named |= {
                node.name
                for node in tree.body
                if isinstance(node, ast.ClassDef)
                and {"TransformerModel", "PooledTransformer", "Architecture"}
                & {base.id for base in node.bases if isinstance(base, ast.Name)}
            }
    return named


def words(tree: ast.AST) -> set[str]:
    """Names and strings of a module, without docstrings."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name.rpartition(".")[2])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def known_in(path: Path) -> set[str]:
    """Classes and kinds of architectures that a module names."""
    return words(ast.parse(path.read_text())) & (own_names() | set(CLASSES))


def test_no_room_names_an_architecture():
    assert {"NVEmbedConfig", "CDE", "NomicMoe", "BiEncoder", "Causal2Vec"} <= own_names()
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted(ROOT.rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(MAY_KNOW) and (names := known_in(path))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line", ["isinstance(m, CDE)", "m.kind == 'cde'", "import x.NVEmbedConfig"]
)
def test_a_line_that_names_one_would_be_found(line, tmp_path):
    (tmp_path / "room.py").write_text(f'"""Of CDE."""\n{line}\n')
    assert known_in(tmp_path / "room.py")
    (tmp_path / "room.py").write_text('"""Of CDE."""\nm.context_places\n')
    assert not known_in(tmp_path / "room.py")


@pytest.fixture(scope="module")
def imports():
    """Imports of all modules at run time."""
    return grimp.build_graph("rayembed", exclude_type_checking_imports=True)


def folder_of(module: str) -> str | None:
    """The architecture's package that the module lies in."""
    names = [f"rayembed.{'.'.join(folder.parts)}" for folder in FOLDERS]
    return next((name for name in names if module.startswith(f"{name}.")), None)


def test_only_recipes_and_samples_import_an_architecture(imports):
    arrows = {
        (importer, module)
        for module in imports.modules
        if folder_of(module)
        for importer in imports.find_modules_that_directly_import(module)
        if folder_of(importer) != folder_of(module)
    }
    allowed = re.compile(r"rayembed\.(recipes|samples)\b")
    assert arrows, "the control: recipes import settings"
    assert not {importer for importer, _ in arrows if not allowed.match(importer)}


def test_settings_of_an_architecture_need_no_torch():
    assert [kind_of(cls) for cls in CLASSES.values()] == list(CLASSES)
    settings = [cls.__module__ for cls in CLASSES.values()]
    code = [cls.architecture.partition(":")[0] for cls in CLASSES.values()]
    lines = [
        "import sys",
        f"import {', '.join(settings)}",
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)",
        f"import {', '.join(code)}",
        "assert 'torch' in sys.modules and 'ray' not in sys.modules",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
