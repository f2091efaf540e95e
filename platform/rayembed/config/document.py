"""Settings that form a file of their own: written as YAML, read back, fingerprinted."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from rayembed.config.settings import Settings, parse
from rayembed.config.yaml_text import read_yaml, write_yaml
from rayembed.errors import ConfigError

# As a setting, also of a loader (`st:/…`) or a database, or a line of a record: from its first sign
# to its last.
_LOCAL = re.compile(r"(?:(?:st|mteb):|file://|sqlite(?:\+\w+)?:///)?((?:/|~[\w.-]*/)[^\s/][^\n]*)")

AnyDocument = TypeVar("AnyDocument", bound="Document")


class Document(Settings):
    """Complete settings of a job: `--dry-run` prints them, `--recipe file.yaml` reads them."""

    def identity(self) -> dict[str, Any]:
        """Fingerprinted settings as plain values: everything that the results depend on."""
        return self.model_dump(mode="json", exclude={"name", "placement"})

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the identity, twelve hexadecimal digits."""
        return fingerprint(self.identity())

    def to_yaml(self) -> str:
        """All settings as YAML."""
        return write_yaml(self.model_dump(mode="json"))

    def published(self) -> str:
        """All settings as YAML for readers elsewhere; see `without_places`."""
        values = self.model_dump(mode="json")
        storage = (values.get("placement") or {}).get("storage_path", "")
        return write_yaml(without_places(values, storage))

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read settings from a YAML file written by `to_yaml` or a user.

        Raises:
            ConfigError: no such file, not YAML, or settings that do not hold.
        """
        return parse(cls, read_mapping(path))


def without_places(values: Any, storage: str = "") -> Any:
    """Plain values with each absolute local path made relative to the storage, or reduced to its
    last part where it lies elsewhere: for what leaves the machine.

    Args:
        storage: folder that the run's results lie in; the storage itself becomes its last part.
    """
    if isinstance(values, Mapping):
        return {
            without_places(key, storage): without_places(value, storage)
            for key, value in values.items()
        }
    if isinstance(values, list | tuple):
        return [without_places(value, storage) for value in values]
    if not isinstance(values, str):
        return values
    root = "" if not storage or "://" in storage else os.path.abspath(_expanded(storage))  # noqa: PTH100
    if (match := _LOCAL.fullmatch(values)) is None:
        # Of a sentence only what is certainly a path of this machine.
        for place, sent in ((root, ""), (_expanded("~"), "~/")):
            if len(place) > 1:
                values = values.replace(f"{place}/", sent)
        return values
    path = Path(_expanded(match[1]))
    if root and path != Path(root) and path.is_relative_to(root):
        return path.relative_to(root).as_posix()
    return path.name


def _expanded(path: str) -> str:
    return os.path.expanduser(path)  # noqa: PTH111 - pathlib raises for an unknown user


def fingerprint(values: Any) -> str:
    """Twelve hexadecimal digits of the SHA-256 of canonical JSON.

    Raises:
        TypeError: a value has no stable form in JSON.
    """
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Unvalidated settings in a YAML file.

    Raises:
        ConfigError: no such file, or not a mapping in YAML.
    """
    try:
        values = read_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the run {str(path)!r}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"the run {str(path)!r} must be a mapping of settings, as --dry-run prints one"
        )
    return values
