"""Folders of what pip would install for some requirements, and a process that sees no more."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

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


def embed_alone(
    models: Mapping[str, tuple[Path, Path]], texts: Sequence[str], home: Path
) -> dict[str, Any]:
    """Vectors of registered models by a process that sees nothing but what is linked.

    Args:
        models: name → folder of the registered model, and of links that are added before it is
            loaded; those of earlier ones stay.
        home: an empty folder.

    Returns:
        `vectors`: name → those of queries and of documents; `errors`: name → why it did not load;
        `code`: where the last model's code was.
    """
    answer = home / "answer.json"
    asked = {
        "models": {name: list(map(str, both)) for name, both in models.items()},
        "texts": list(texts),
        "answer": str(answer),
    }
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("embed_alone.py"))],
        input=json.dumps(asked),
        cwd=home,
        env={
            "HOME": str(home),
            "PATH": "/usr/bin:/bin",
            "HF_HUB_OFFLINE": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(answer.read_text()))
