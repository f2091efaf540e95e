"""Tables of alternatives for settings with a `kind`, extended by other packages through entry
points.

A table names the settings class of each of its members by an import string; importing such a module
loads neither torch nor Ray. A package outside of this one adds members by entry points of the
table's group, whose names are their kinds:

    [project.entry-points."rayembed.losses"]
    my_loss = "my_package.loss:MyLoss"
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from configparser import ConfigParser
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module, metadata
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, Union

from pydantic import BeforeValidator, Field, create_model

from rayembed.config.settings import Settings, kind_of, nearest
from rayembed.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class SettingsTable:
    """Table of settings classes by their `kind`, such as the table of losses."""

    group: str
    """Group of entry points by which other packages add members."""
    base: type[Settings]
    """Class that the settings of every member derive from."""
    built_in: tuple[str, ...]
    """Import strings `module:Class` of the members of this package, in the order of messages."""
    default: Any = None
    """Kind of settings without a `kind`, which is the first member's; None: they must name one."""

    def classes(self) -> dict[str, type[Settings]]:
        """Settings classes by kind, this package's first.

        A member of another package that cannot be imported, is no settings class of this table or
        has a kind that another one has is left out with a warning.
        """
        return self._members()[0]

    def _members(self) -> tuple[dict[str, type[Settings]], dict[str, str]]:
        """Settings classes by kind, and the reasons why some kinds of other packages were
        left out.
        """
        found: dict[str, type[Settings]] = {}
        for reference in self.built_in:
            _add(self, found, load(reference), reference)
        return found, _add_outside(self.group, partial(self._add_class, found))

    def _add_class(self, found: dict[str, type[Settings]], point: EntryPoint, member: Any) -> None:
        _add(self, found, member, f"{point.value} ({_package(point)})")
        if point.name not in found:
            del found[str(kind_of(member))]
            raise ConfigError(
                f"the entry point {point.name!r} of {self.group!r} ({_package(point)}) names "
                f"{point.value}, which has another kind; give the entry point and the kind the "
                "same name"
            )

    def union(self) -> Any:
        """Type annotation, for pydantic, of a setting that holds one of the members.

        With a default, the kind alone also stands for a member with its defaults: `loss: siglip`.
        """
        members, left_out = self._members()
        found = tuple(members.values())
        if len(found) == 1:
            return found[0]
        with_kind = BeforeValidator(partial(_with_kind, self.default, left_out))
        kind = Field(discriminator="kind")
        return Annotated[Union[found], kind, with_kind]  # noqa: UP007 # made here


@dataclass(frozen=True)
class NamedTable(Generic[T]):
    """Table of objects of one type, such as jobs, by name."""

    group: str
    """Group of entry points by which other packages add members."""
    base: type[T]
    noun: str
    """Noun for a member in messages."""
    built_in: Mapping[str, T]

    def members(self) -> dict[str, T]:
        """All members by name, this package's first; members that cannot be imported cause a
        warning.
        """
        found = dict(self.built_in)
        _add_outside(self.group, partial(self._add, found))
        return found

    def get(self, name: str) -> T:
        """Look up a member by name; other packages are imported only for names that this package
        lacks.

        Raises:
            ConfigError: no such member; the message names the nearest one.
        """
        found = self.built_in if name in self.built_in else self.members()
        if name not in found:
            raise ConfigError(f"no {self.noun} {name!r}; {nearest(name, found)}")
        return found[name]

    def _add(self, found: dict[str, T], point: EntryPoint, member: Any) -> None:
        if not isinstance(member, self.base) or point.name in found:
            problem = (
                f"is no {self.base.__module__}.{self.base.__qualname__}"
                if point.name not in found
                else f"has the name {point.name!r}, which another member has; give it another"
            )
            raise ConfigError(f"{self.group}: {point.value} ({_package(point)}) {problem}")
        found[point.name] = member


def with_members(settings: Any, members: Iterable[Any]) -> Any:
    """Extend a settings class by an optional setting for each member, named by its kind."""
    # Left out of what is fingerprinted while it is None: a package that is installed or removed
    # must not rename the data of runs that ask for nothing of it.
    further: dict[str, Any] = {
        member.kind: (member | None, Field(default=None, exclude_if=lambda it: it is None))
        for member in members
        if member.kind not in settings.model_fields
    }
    name, module = settings.__name__, settings.__module__
    return create_model(name, __base__=settings, __module__=module, **further)


def load(reference: str) -> Any:
    """Load the object that an import string `module:name` names."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def _with_kind(default: str | None, left_out: Mapping[str, str], value: Any) -> Any:
    if default is not None and isinstance(value, str):
        value = {"kind": value}
    if default is not None and isinstance(value, Mapping) and "kind" not in value:
        return {"kind": default, **value}
    if isinstance(value, Mapping) and value.get("kind") in left_out:
        raise ValueError(left_out[value["kind"]])
    return value


def _add_outside(group: str, add: Callable[[EntryPoint, Any], None]) -> dict[str, str]:
    """Add the members that other packages define, sorted by name; return the reasons why some were
    left out.
    """
    left_out: dict[str, str] = {}
    for point in entry_points(group):
        try:
            add(point, from_outside(point))
        except ConfigError as error:  # runs that want nothing of it go on
            left_out[point.name] = str(error)
            logger.warning("skipping an extension that cannot be used: %s", error)
    return left_out


def from_outside(point: EntryPoint) -> Any:
    """Import the object that another package's entry point names.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return point.load()
    except Exception as error:  # whatever a package does when it is imported
        raise ConfigError(
            f"{_package(point)} adds {point.name!r} to {point.group!r}, but {point.value} cannot "
            f"be imported: {error}; install what it needs, or uninstall it"
        ) from error


def _add(table: SettingsTable, found: dict[str, type[Settings]], member: Any, told: str) -> None:
    if not (isinstance(member, type) and issubclass(member, table.base)):
        raise ConfigError(
            f"{table.group}: {told} is not a settings class that derives from "
            f"{table.base.__module__}.{table.base.__qualname__}"
        )
    kind = kind_of(member)
    if kind is None or kind in found:
        problem = (
            "has no kind" if kind is None else f"has the kind {kind!r}, which another member has"
        )
        raise ConfigError(f"{table.group}: {told} {problem}; give it a kind of its own")
    found[kind] = member


def _package(point: EntryPoint) -> str:
    return "a package" if point.dist is None else f"package {point.dist.name}"


COMPANIONS = ("rayembed_extras", "rayembed_papers")


def entry_points(group: str) -> list[EntryPoint]:
    """List the entry points of a group, sorted by name."""
    found = [*metadata.entry_points(group=group)]
    for package in COMPANIONS:
        spec = find_spec(package)  # each time: the code of a registered model may bring one
        for folder in (spec and spec.submodule_search_locations) or ():
            found += [point for point in _points_in(folder) if point.group == group]
    return sorted(found, key=lambda point: point.name)


@cache
def _points_in(folder: str) -> tuple[EntryPoint, ...]:
    found = []
    for file in sorted(Path(folder).glob("**/entry_points.txt")):
        lines = ConfigParser(delimiters=("=",), interpolation=None)
        lines.optionxform = str  # type: ignore[assignment,method-assign]
        lines.read_string(file.read_text(encoding="utf-8"))
        for group in lines.sections():
            found += [EntryPoint(*item, group) for item in lines.items(group)]
    return tuple(found)
