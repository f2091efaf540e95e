"""A folder that holds what pip would install for some requirements, and nothing else."""

from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """All distributions that the requirements ask for, with extras and markers, by name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        asked = waiting.pop()
        try:
            there = distribution(asked.name)
        except PackageNotFoundError:
            continue  # for a machine of another kind, such as CUDA's libraries
        name = canonicalize_name(asked.name)
        found[name] = there
        for extra in {"", *asked.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            needs = [Requirement(line) for line in there.requires or ()]
            waiting += [
                need
                for need in needs
                if need.marker is None or need.marker.evaluate({"extra": extra})
            ]
    return found


def link_closure(requirements: Iterable[str], folder: Path) -> Path:
    """The folder, with links to the files of the requirements' closure as in site-packages."""
    folder.mkdir()
    for there in closure(requirements).values():
        for top in {file.parts[0] for file in there.files or ()} - {"..", "__pycache__"}:
            link, place = folder / top, Path(str(there.locate_file(top)))
            if place.exists() and not link.exists():
                link.symlink_to(place)
    return folder
