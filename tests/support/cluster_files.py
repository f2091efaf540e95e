"""The files under cluster/ as the READMEs use them: variables filled in as `envsubst` does."""

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "cluster"

FILLED = {
    "IMAGE": "registry.example.org/team/rayembed-gpu:1a2b3c",
    "IMAGE_CPU": "registry.example.org/team/rayembed-cpu:1a2b3c",
    "STORAGE": "s3://bucket/rayembed",
    "BUCKET": "bucket",
    "REGION": "us-west-2",
    "ACCOUNT": "123456789012",
    "AMI": "ami-0123456789abcdef0",
    "PROJECT": "a-project",
    "ZONE": "us-west-2-a",
}
"""What a user exports before the commands of the READMEs."""


def fill(text: str, values: Mapping[str, str] = FILLED) -> str:
    """The text with `${NAME}` replaced; a name without a value stays, as with envsubst."""
    return re.sub(r"\$\{([A-Z_]+)\}", lambda m: values.get(m[1], m[0]), text)


def documents(path: Path) -> list[dict[str, Any]]:
    """The YAML documents of a file."""
    return [found for found in yaml.safe_load_all(fill(path.read_text())) if found]


def changed(document: Any, path: str, value: Any) -> Any:
    """A copy with another value at the dotted path; `...` removes what stands there."""
    copied = copy.deepcopy(document)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = copied
    for part in parents:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return copied


def fenced(path: Path) -> list[tuple[str, str]]:
    """Language and text of each fenced block of a Markdown file."""
    found: list[tuple[str, str]] = []
    inside: list[str] | None = None
    language = ""
    for line in path.read_text().splitlines():
        if line.startswith("```") and inside is None:
            inside, language = [], line.removeprefix("```")
        elif line.startswith("```"):
            found.append((language, "\n".join(inside or [])))
            inside = None
        elif inside is not None:
            inside.append(line)
    return found


def readme_commands(path: Path) -> list[str]:
    """Each command of the blocks for a shell, its continued lines joined."""
    blocks = [text for language, text in fenced(path) if language in ("", "bash")]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
