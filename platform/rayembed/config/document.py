"""Base classes for settings that form a whole file: written as YAML, read back, fingerprinted."""

import hashlib
import json
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import yaml

from rayembed.config.settings import Settings, parse
from rayembed.errors import ConfigError

if TYPE_CHECKING:
    from rayembed.config.placement import Placement


# As a setting, also of a loader (`st:/…`) or a database, or a line of a record: from its first sign
# to its last.
_LOCAL = re.compile(
    r"(?:(?:st|mteb):|file://|sqlite(?:\+\w+)?:///)?((?:/|~[\w.-]*/|(?:\./)*\.\./)[^\s/][^\n]*)"
)

AnyDocument = TypeVar("AnyDocument", bound="Document")


class Document(Settings):
    """Base class for the complete settings of a job, as `--dry-run` prints and `--recipe file.yaml`
    reads.
    """

    def identity(self, write: Callable[[str], str] | None = None) -> dict[str, Any]:
        """Fingerprinted settings as plain values: all settings that the results depend on.

        Args:
            write: gives the text of each `Reference`; None: as it is. See `published_reference`.
        """
        return self.model_dump(mode="json", exclude={"name", "placement"}, context=write)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the identity, twelve hexadecimal digits."""
        return fingerprint(self.identity())

    def to_yaml(self) -> str:
        """All settings as YAML."""
        return write_yaml(self.model_dump(mode="json"))

    def published(self) -> str:
        """Dump all settings as YAML for readers on other machines; see `published_reference`."""
        storage = getattr(getattr(self, "placement", None), "storage_path", "")
        return write_yaml(published_values(self, storage))

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read settings from a YAML file written by `to_yaml` or a user.

        Raises:
            ConfigError: no such file, not YAML, or settings that do not hold.
        """
        return parse(cls, read_mapping(path))


class NamedRun(Document):
    """Base class for the settings of a run that trains weights in a folder of its own, tracked in
    MLflow.

    Each kind has the fields below in an order of its own.
    """

    if TYPE_CHECKING:
        name: str
        model: Any
        """Settings with a `backbone`."""
        placement: Placement

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Number of training steps of the whole run."""

    @property
    @abstractmethod
    def stage_names(self) -> tuple[str, ...]:
        """Names of the stages, which also name their folders."""

    @property
    def published_identity(self) -> dict[str, Any]:
        """Identity settings for readers on other machines; see `published_reference`."""
        return self.identity(published_reference(self.placement.storage_path))


def published_values(settings: Settings, storage: str) -> dict[str, Any]:
    """Settings as plain values with each `Reference` converted by `published_reference`, without
    paths of this machine. Other texts, such as prefixes, lose only what is certainly a path of this
    machine: storage and home folder.
    """
    sent = settings.model_dump(mode="json", context=published_reference(storage))
    published: dict[str, Any] = _each_text(sent, lambda text: _sentence(text, _root(storage)))
    return published


def published_reference(storage: str) -> Callable[[str], str]:
    """Return a function that converts a `Reference` to its published form; see `without_places`."""
    return lambda reference: str(without_places(reference, storage))


def without_places(values: Any, storage: str = "") -> Any:
    """Make local paths in plain values relative to the storage or keep only their last part, for
    publication.

    Paths are known by their form here; settings know theirs, see `published_values`.

    Args:
        storage: folder that the run's results lie in; the storage itself becomes its last part.
    """
    return _each_text(values, lambda text: _without_place(text, _root(storage)))


def _each_text(values: Any, write: Callable[[str], str]) -> Any:
    if isinstance(values, Mapping):
        return {_each_text(k, write): _each_text(v, write) for k, v in values.items()}
    if isinstance(values, list | tuple):
        return [_each_text(value, write) for value in values]
    return write(values) if isinstance(values, str) else values


def _without_place(text: str, root: str) -> str:
    if (match := _LOCAL.fullmatch(text)) is None:
        return _sentence(text, root)
    path = Path(os.path.normpath(_expanded(match[1])))
    if root and path != Path(root) and path.is_relative_to(root):
        return path.relative_to(root).as_posix()
    return path.name


def _sentence(text: str, root: str) -> str:
    """Shorten this machine's absolute paths in a text: the storage's path is removed, the home
    folder becomes `~`.
    """
    for place, sent in ((root, ""), (_expanded("~"), "~/")):
        if len(place) > 1:
            text = text.replace(f"{place}/", sent)
    return text


def _root(storage: str) -> str:
    """Absolute path of the storage; empty if it is not on this machine."""
    return "" if not storage or "://" in storage else os.path.abspath(_expanded(storage))  # noqa: PTH100


def _expanded(path: str) -> str:
    return os.path.expanduser(path)  # noqa: PTH111 - pathlib raises for an unknown user


def fingerprint(values: Any) -> str:
    """Hash plain values: the first twelve hexadecimal digits of the SHA-256 of their canonical
    JSON.

    Raises:
        TypeError: a value has no stable form in JSON.
    """
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read settings from a YAML file without validating them.

    Raises:
        ConfigError: no such file, or not a mapping in YAML.
    """
    try:
        values = read_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the settings file {str(path)!r}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"the settings file {str(path)!r} must contain a YAML mapping of settings, such as "
            "--dry-run prints"
        )
    return values


class _TextLoader(yaml.SafeLoader):
    """YAML loader that reads all scalars as text or null; duplicate keys are errors."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - the base class declares it so

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a YAML mapping; raise if a key is not text or occurs twice."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a name of a setting must be a text", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the name {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_TextLoader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$"), ["~", "n", ""]
)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes and escapes texts with line breaks and other unprintable
    characters.

    Each value stands on one line, and PyYAML does not fold breaks such as U+0085 into spaces.
    """


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def read_yaml(text: str) -> Any:
    """Parse YAML into mappings, lists, texts and None.

    Raises:
        yaml.YAMLError: not YAML, or a name given twice.
    """
    return yaml.load(text, Loader=_TextLoader)


def write_yaml(values: Any) -> str:
    """Write plain values as YAML in their order, one value on each line."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)
