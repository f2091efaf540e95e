"""What we ask of a Dockerfile: stages, pins, user, sources, no secrets. Problems as text."""

import re
import shlex
from pathlib import Path

from dockerfile_parse import DockerfileParser
from dockerfile_parse.util import WordSplitter

_PINNED = re.compile(r"^[^:@\s]+(:\d+\.\d+\.\d+[\w.-]*|@sha256:[0-9a-f]{64})$")
_SECRET = re.compile(r"PASSW|TOKEN|SECRET|_KEY\b|CREDENTIAL", re.IGNORECASE)


def dockerfile_problems(path: Path, root: Path) -> list[str]:
    """Of one Dockerfile.

    Args:
        root: the folder that `docker build` is given.
    """
    steps = [(s["instruction"], s["value"]) for s in DockerfileParser(str(path)).structure]
    found, stages = _stage_problems(steps)
    for kind, value in steps:
        match kind:
            case "ARG" | "ENV":
                names = [word.partition("=")[0] for word in shlex.split(value)]
                kept = [name for name in names if _SECRET.search(name)]
                found += [f"{kind} {name} would stay in the image" for name in kept]
            case "RUN":
                found += _run_problems(value)
            case "COPY":
                found += _copy_problems(shlex.split(value), root, stages)
            case "ADD":
                found.append("ADD fetches and unpacks; use COPY")
            case "ENTRYPOINT":
                found.append("KubeRay and `ray up` start bash, which an ENTRYPOINT would get")
    return found


def _stage_problems(steps: list[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Problems of base images and of the last stage's user, and the names of the stages."""
    found: list[str] = []
    stages: list[str] = []
    arguments: dict[str, str] = {}
    user = "root"
    for kind, value in steps:
        if kind == "ARG" and not stages:
            name, _, default = value.partition("=")
            arguments[name] = default
        elif kind == "FROM":
            base, _, name = value.partition(" AS ")
            image = WordSplitter(base, args=arguments).dequote()
            if image not in stages and not _PINNED.match(image):
                found.append(f"the base image {image!r} is not pinned")
            stages.append(name.strip() or image)
            user = "root"
        elif kind == "USER":
            user = value
    if len(stages) < 2:
        found.append("what only building needs stays in the image")
    if not re.fullmatch(r"[1-9]\d*(:\d+)?", user):
        found.append(f"runs as {user!r}, not as a number above 0")
    return found, stages


def _run_problems(command: str) -> list[str]:
    found = []
    for part in re.split(r"&&|;", command):
        installs = re.search(r"\bpip3? install\b", part)
        if installs and "-c cluster/constraints.txt" not in part:
            found.append(f"packages of any version: {part.strip()}")
        if "apt-get install" in part and "--no-install-recommends" not in part:
            found.append(f"installs what nobody asked for: {part.strip()}")
        if re.search(r"\b(curl|wget)\b.*\|\s*(sh|bash)\b", part):
            found.append(f"runs what it fetches: {part.strip()}")
    return found


def _copy_problems(words: list[str], root: Path, stages: list[str]) -> list[str]:
    options = [word for word in words if word.startswith("--")]
    *sources, _ = [word for word in words if not word.startswith("--")]
    of_stage = [option.removeprefix("--from=") for option in options if "--from=" in option]
    if of_stage:
        return [f"there is no stage {s!r}" for s in of_stage if s not in stages]
    return [f"there is no {source!r} to copy" for source in sources if not (root / source).exists()]


def ignored(rules: str, name: str) -> bool:
    """Whether a file `*.dockerignore` of names and `!names` keeps a path of the root away."""
    kept = True
    for line in rules.splitlines():
        rule = line.strip()
        if not rule or rule.startswith("#"):
            continue
        wanted = rule.removeprefix("!")
        if wanted in ("*", name) or name.startswith(f"{wanted}/"):
            kept = rule.startswith("!")
    return not kept
