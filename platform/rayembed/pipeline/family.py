"""A family of sizes as a command names it. Imports neither torch nor Ray."""

from dataclasses import dataclass
from typing import Any

from rayembed.compression.contract import Compression
from rayembed.config.compression import COMPRESSIONS
from rayembed.config.run import Run
from rayembed.config.settings import nearest, parse
from rayembed.config.yaml_text import read_yaml
from rayembed.errors import ConfigError


@dataclass(frozen=True)
class Size:
    """What is done to the whole model, way after way."""

    ways: tuple[Compression, ...]

    @property
    def label(self) -> str:
        """Short name, also of its run."""
        return "-".join(way.label for way in self.ways)


@dataclass(frozen=True)
class Family:
    """What the job makes."""

    run: Run
    """Training of each size; its backbone is the whole model."""
    sizes: tuple[Size, ...]
    texts: str | None
    """Files whose texts say which tokens are kept; None: the training data."""


def size_in(text: str) -> Size:
    """The size of `kind,setting=value,…`, several ways joined by `+`.

    Raises:
        ConfigError: an unknown way, or settings that it does not have.
    """
    return Size(tuple(_way(part) for part in text.split("+")))


def _way(text: str) -> Compression:
    kind, *settings = text.split(",")
    classes = COMPRESSIONS.classes()
    if kind not in classes:
        raise ConfigError(f"--size {text!r}: there is no way {kind!r}; {nearest(kind, classes)}")
    found: dict[str, Any] = {"kind": kind}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(
                f"--size {text!r}: {setting!r} is no setting; write kind,setting=value, as "
                "layers,share=0.5"
            )
        # YAML takes 2:4 for a number to the base of 60.
        found[name] = value if ":" in value else read_yaml(value)
    way = parse(classes[kind], found)
    assert isinstance(way, Compression)
    return way
