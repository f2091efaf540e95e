"""Module classes of a sentence-transformers folder, and whether the folder brings its own
code.

sentence-transformers imports the classes that `modules.json` names. With `trust_remote_code` it
also runs Python files of the folder, so no code of ours ever gives that leave: a folder of our own
format is loaded by our own function, any other without the flag.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

from rayembed.errors import ArtifactError

OWN_MODULE = "rayembed.models.sentence_module.SentenceModule"
"""The only rayembed class that a saved model names. It is the single entry of `modules.json`."""


def module_types(folder: Path) -> list[str]:
    """Dotted class names in the folder's `modules.json`; empty without the file.

    Raises:
        ArtifactError: the file is no list of modules.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        return [str(module["type"]) for module in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"cannot read the modules in {str(path)!r}: {error!r}") from error


def is_own_format(folder: Path) -> bool:
    """Whether the folder is a saved rayembed model that cannot be loaded without rayembed."""
    return module_types(folder) == [OWN_MODULE]


def foreign_modules(folder: Path) -> list[str]:
    """Names of the folder's module classes that belong neither to sentence-transformers nor to
    rayembed.

    The exact name counts: `rayembed.Module` would be looked for in a file `rayembed.py` of the
    folder.
    """
    if is_own_format(folder):
        return []
    return [t for t in module_types(folder) if not t.startswith("sentence_transformers.")]


@contextmanager
def no_pickled_objects(folder: str | Path) -> Iterator[None]:
    """Context manager for reading weights: a file with pickled objects raises an error that says
    what to do.

    torch's own error advises to allow them, which would run whatever code they name.

    Raises:
        ArtifactError: a file of weights holds objects other than tensors, or is damaged.
    """
    try:
        yield
    except UnpicklingError as error:
        named = re.search(r"GLOBAL ([A-Za-z_][\w.]*)|class [`']([\w.]+)", str(error))
        if named is None:
            raise ArtifactError(
                f"cannot read the weights in {str(folder)!r}: a pickled file there is damaged; "
                "copy or download it again"
            ) from None
        raise ArtifactError(
            f"cannot read the weights in {str(folder)!r}: a pickle file there holds objects other "
            f"than tensors ({named[1] or named[2]}), which can run code when they are read; "
            "nothing was run. If you trust the file, convert it to safetensors "
            "(model.save_pretrained writes these), or use a revision that has model.safetensors"
        ) from None
