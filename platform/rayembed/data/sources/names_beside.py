"""Parts of error messages about missing paths, which suggest similar names in the same folder."""

import difflib
import errno
from collections.abc import Sequence
from pathlib import Path

from rayembed.assets.storage import is_remote

NAMES_SHOWN = 8


def missing(path: str) -> str:
    """Explain why a path does not exist, with similar names in its folder."""
    here = Path(path).expanduser()
    if is_remote(path):
        return "no such file, folder or prefix"
    if here.is_symlink():
        try:
            here.stat()
        except OSError as error:
            circle = error.errno == errno.ELOOP
            leads = "in a circle" if circle else f"to {str(here.readlink())!r}, which is not there"
            return f"it is a symbolic link that leads {leads}"
    folder = here.absolute().parent
    if not folder.is_dir():
        there = f"no such file, and the folder {str(folder)!r} is not there either"
        return there + of_patterns(path)
    names = sorted(item.name for item in folder.iterdir() if not hidden(item.name))
    close = difflib.get_close_matches(here.name, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"{str(folder)!r} holds {shown_names(names)}"
    return f"no such file, folder or prefix; {hint}{of_patterns(path)}"


def of_patterns(path: str) -> str:
    """Return a hint if the path has characters that are wildcards in other tools, else an empty
    text.
    """
    meant = any(sign in path.partition("?")[0] for sign in "[]{}") or "?" in path
    return "; only the wildcards * and ** are known, ? [] {} stand for themselves" if meant else ""


def shown_names(names: Sequence[str]) -> str:
    """Join the first names of a list into a text for messages."""
    more = ", …" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more if names else "nothing"


def hidden(name: str) -> bool:
    """Whether a name or one of its folders begins with `.` or `_`, as hidden files do."""
    return any(part.startswith((".", "_")) for part in name.split("/") if part)
