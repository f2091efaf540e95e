"""Members that other packages add to tables: by entry points, or by files of packages beside this.

A package that is installed uses entry points of its own distribution. Those that come with this
one and that it never imports, optional features and papers, have files `entry_points.txt` of the
same form in their folders: it travels with an uploaded checkout, is as new as the code
beside it, and goes with the folder.
"""

from configparser import ConfigParser
from functools import cache
from importlib import metadata
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

COMPANIONS = ("rayembed_extras", "rayembed_papers")


def entry_points(group: str) -> list[EntryPoint]:
    """Entry points of a group, sorted by name."""
    found = [point for point in _of_companions() if point.group == group]
    return sorted([*found, *metadata.entry_points(group=group)], key=lambda point: point.name)


@cache
def _of_companions() -> tuple[EntryPoint, ...]:
    found = []
    for package in COMPANIONS:
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for file in sorted(Path(folder).glob("**/entry_points.txt")):
                lines = ConfigParser(delimiters=("=",), interpolation=None)
                lines.optionxform = str  # type: ignore[assignment,method-assign]
                lines.read_string(file.read_text(encoding="utf-8"))
                for group in lines.sections():
                    found += [EntryPoint(*item, group) for item in lines.items(group)]
    return tuple(found)
