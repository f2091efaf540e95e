"""Settings that form a file of their own: written as YAML, read back, fingerprinted."""

import hashlib
import json
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from rayembed.config.settings import Settings, parse
from rayembed.config.yaml_text import read_yaml, write_yaml
from rayembed.errors import ConfigError

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

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read settings from a YAML file written by `to_yaml` or a user.

        Raises:
            ConfigError: no such file, not YAML, or settings that do not hold.
        """
        return parse(cls, read_mapping(path))


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
