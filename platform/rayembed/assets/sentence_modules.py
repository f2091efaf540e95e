"""Module classes of a sentence-transformers folder, and whether they are foreign code.

sentence-transformers imports the classes that `modules.json` names. With `trust_remote_code` it
also runs Python files of the folder, so no code of ours ever gives that leave: a folder of our own
format is loaded by our own function, any other without the flag.
"""

import json
from pathlib import Path

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
    """Whether the folder is a saved rayembed model that needs rayembed to load."""
    return module_types(folder) == [OWN_MODULE]


def foreign_modules(folder: Path) -> list[str]:
    """Classes that belong neither to sentence-transformers nor to rayembed.

    The exact name counts: `rayembed.Module` would be looked for in a file `rayembed.py` of the
    folder.
    """
    if is_own_format(folder):
        return []
    return [t for t in module_types(folder) if not t.startswith("sentence_transformers.")]
