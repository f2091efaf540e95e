"""A family of sizes as a command names it. Imports neither torch nor Ray."""

from dataclasses import dataclass

from rayembed.compression.contract import Compression
from rayembed.config.compression import COMPRESSIONS, settings_in
from rayembed.config.run import Run
from rayembed.config.settings import nearest, parse
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
    languages: tuple[str, ...] = ()
    """Languages of the training data's texts that say so; none: all."""


def size_in(text: str) -> Size:
    """The size of `kind,setting=value,…`, several ways joined by `+`.

    Raises:
        ConfigError: an unknown way, or settings that it does not have.
    """
    return Size(tuple(_way(part) for part in text.split("+")))


def cuts() -> dict[str, type[Compression]]:
    """Ways whose models are trained on, by their `kind`."""
    classes = COMPRESSIONS.classes().items()
    return {kind: way for kind, way in classes if issubclass(way, Compression) and way.is_cut}


def _way(text: str) -> Compression:
    found, ways = settings_in(text), cuts()
    if found["kind"] not in ways:
        raise ConfigError(
            f"--size {text!r}: a size is made by {' or '.join(ways)}, whose models are trained on; "
            f"{nearest(found['kind'], ways)} jobs/compress_model.py has the other ways"
        )
    return parse(ways[found["kind"]], found)
