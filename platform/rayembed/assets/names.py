"""Make safe path parts from external names, such as those in registries, manifests and listings."""

import hashlib
import re
from pathlib import Path

from rayembed.errors import ArtifactError

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_OTHER = re.compile(r"[^A-Za-z0-9_-]+")


def folder_name(text: str) -> str:
    """Convert any text to a safe file or folder name; different texts get different names.

    A plain text is its own name: letters, digits, `.`, `_` and `-`, at most 100 of them. Any other
    is what is plain in it and a hash of the whole.
    """
    if _PLAIN.fullmatch(text):
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{_OTHER.sub('_', text)[:60].strip('_') or 'name'}-{digest}"


def check_inside(name: object, source: str) -> str:
    """Check and return a relative path; raise if it would leave the folder that it is
    joined to.

    Args:
        source: what gave the name, for the message.

    Raises:
        ArtifactError: it leads out of the folder, is absolute, or is no path.
    """
    if (
        not isinstance(name, str)
        or not name
        or name.startswith("/")
        or "\0" in name
        or ".." in re.split(r"[/\\]", name)
    ):
        raise ArtifactError(
            f"{source} names {name!r}, which is no path inside its folder; nothing was read or "
            "written there. Paths with '..' or a leading '/' are refused: get the files again from "
            "a source that you trust"
        )
    return name


def below(folder: Path, name: object, source: str) -> Path:
    """Join a relative name to a folder, after `check_inside`.

    Raises:
        ArtifactError: as `check_inside`.
    """
    return folder / check_inside(name, source)
