"""The parts of the house: which one a test file belongs to, and a copy of the core alone.

python tests/support/parts.py FOLDER      a copy of the checkout without the other parts
"""

import shutil
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPANIONS = ("rayembed_extras", "rayembed_papers")
EXTRAS = ROOT / "platform" / "rayembed_extras"
FLATS = sorted(path.parent.name for path in EXTRAS.glob("*/__init__.py"))


def part_of(file):
    """The part that a test file belongs to, by its prefix: `test_sweeps_space.py`, `sweeps`.

    What looks at all parts at once, as the commands of the guides, is of the `house`.
    """
    name = file.removeprefix("test_")
    if name.startswith("house_"):
        return "house"
    if name.startswith(("papers_", "backbone_")):
        return "papers"
    return next((flat for flat in FLATS if name.startswith(flat)), "core")


def copy_of_the_core(copy):
    """Copy the checkout without optional features, without papers, their jobs and their tests.

    Of each package its `__init__.py` stays, so that Python finds no other copy of it elsewhere.
    """
    leave = shutil.ignore_patterns(
        *(".venv*", ".git", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "outputs")
    )
    shutil.copytree(ROOT, copy, ignore=leave, symlinks=True)
    gone = {"rayembed_papers"}
    for package in COMPANIONS:
        for file in (copy / "platform" / package).rglob("entry_points.txt"):
            points = ConfigParser(delimiters=("=",))
            points.read(file)
            if points.has_section("rayembed.jobs"):
                gone |= {f'"{name}"' for name in points["rayembed.jobs"]}
        for path in (copy / "platform" / package).iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "__init__.py":
                path.unlink()
    for path in copy.glob("jobs/**/*.py"):
        if any(name in path.read_text() for name in gone):
            path.unlink()
    for path in copy.glob("tests/**/test_*.py"):
        if part_of(path.name) != "core":
            path.unlink()
    if (ROOT / ".venv").exists():
        (copy / ".venv").symlink_to(ROOT / ".venv")
    return copy


if __name__ == "__main__":
    copy_of_the_core(Path(sys.argv[1]))
