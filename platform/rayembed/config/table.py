"""Tables of alternatives: what a setting with a `kind` may be, also from other packages.

A table names the settings class of each of its members by an import string; importing such a module
loads neither torch nor Ray. A package outside of this one adds members by entry points of the
table's group, whose names are their kinds:

    [project.entry-points."rayembed.losses"]
    my_loss = "my_package.loss:MyLoss"
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Annotated, Any, Union

from pydantic import BeforeValidator, Field

from rayembed.config.entry_points import entry_points
from rayembed.config.settings import Settings, kind_of
from rayembed.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Table:
    """Members of one sort, such as losses, by their `kind`."""

    group: str
    """Group of entry points by which other packages add members."""
    base: type[Settings]
    """Class that the settings of every member derive from."""
    built_in: tuple[str, ...]
    """Import strings `module:Class` of the members of this package, in the order of messages."""
    default: Any = None
    """Kind of settings that name none, which is the first member's; None: they must name one."""

    def classes(self) -> dict[str, type[Settings]]:
        """Settings class of each member by its kind, those of this package first.

        A member of another package that cannot be imported, is no settings class of this table or
        has a kind that another one has is left out with a warning; a part of this package that is
        not installed, without one.
        """
        return self._members()[0]

    def _members(self) -> tuple[dict[str, type[Settings]], dict[str, str]]:
        """Settings class of each member by its kind, and why each other kind is left out."""
        left_out: dict[str, str] = {}
        found: dict[str, type[Settings]] = {}
        for reference in self.built_in:
            _add(self, found, load(reference), reference)
        for point in entry_points(self.group):
            try:
                self._add_outside(found, point)
            except ConfigError as error:  # runs that want nothing of it go on
                left_out[point.name] = str(error)
                if not _is_not_installed(point, error.__cause__):
                    logger.warning("left out: %s", error)
        return found, left_out

    def _add_outside(self, found: dict[str, type[Settings]], point: EntryPoint) -> None:
        member = _from_outside(self, point)
        _add(self, found, member, f"{point.value} ({_package(point)})")
        if point.name not in found:
            del found[str(kind_of(member))]
            raise ConfigError(
                f"the entry point {point.name!r} of {self.group!r} ({_package(point)}) names "
                f"{point.value}, whose kind is another; call both the same"
            )

    def union(self) -> Any:
        """Type of a setting that is one of the members, as pydantic takes it.

        With a default, the kind alone also stands for a member with its defaults: `loss: siglip`.
        """
        members, left_out = self._members()
        found = tuple(members.values())
        if len(found) == 1:
            return found[0]
        with_kind = BeforeValidator(partial(_with_kind, self.default, left_out))
        kind = Field(discriminator="kind")
        return Annotated[Union[found], kind, with_kind]  # noqa: UP007 # made here


def load(reference: str) -> Any:
    """The object that an import string `module:name` names."""
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


def _from_outside(table: Table, point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # whatever a package does when it is imported
        raise ConfigError(
            f"{_package(point)} adds {point.name!r} to {table.group!r}, but {point.value} cannot "
            f"be imported: {error}; mend the package or uninstall it"
        ) from error


def _is_not_installed(point: EntryPoint, cause: BaseException | None) -> bool:
    """Whether a member's own module is missing from this package, as a part that was removed."""
    ours = point.dist is not None and point.dist.name == "rayembed"
    return (
        ours
        and isinstance(cause, ModuleNotFoundError)
        and f"{point.module}.".startswith(f"{cause.name}.")
    )


def _add(table: Table, found: dict[str, type[Settings]], member: Any, told: str) -> None:
    if not (isinstance(member, type) and issubclass(member, table.base)):
        raise ConfigError(
            f"{table.group}: {told} is no class of settings that derives from "
            f"{table.base.__module__}.{table.base.__qualname__}"
        )
    kind = kind_of(member)
    if kind is None or kind in found:
        problem = "has no kind" if kind is None else f"has the kind {kind!r}, which another has"
        raise ConfigError(f"{table.group}: {told} {problem}; give it one of its own")
    found[kind] = member


def _package(point: EntryPoint) -> str:
    return "a package" if point.dist is None else f"package {point.dist.name}"
