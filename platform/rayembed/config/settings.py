"""Base class of all settings: immutable, unknown names are errors, and messages suggest the nearest
name.
"""

import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from rayembed.config.credentials import holds_credentials
from rayembed.errors import ConfigError

SettingsT = TypeVar("SettingsT", bound="Settings")


class Settings(BaseModel):
    """Immutable group of settings; unknown names and values of wrong types are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # it may be an address with a password
    )
    replaces: ClassVar[Mapping[str, str]] = {}
    """Setting → the alternative setting that `--set` makes null with it; one command or call that
    gives both is refused."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Build the end of an error message: the allowed name closest to the given one, or else all
    allowed names.
    """
    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"allowed: {', '.join(names) or 'none'}"


def parse(cls: type[SettingsT], values: Any) -> SettingsT:
    """Validate plain values as settings of the class `cls`.

    Raises:
        ConfigError: one line for each wrong setting, with its full path and the nearest name.
    """
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        items = _one_of_plain([dict(item) for item in error.errors()])
        lines = [_describe(cls, item, values) for item in items if not _follows(item, items)]
        raise ConfigError("\n".join(lines)) from None


def changed(settings: SettingsT, **values: Any) -> SettingsT:
    """Copy the settings with changes, and validate them; pydantic's own `model_copy(update=…)` does
    not validate.
    """
    return type(settings).model_validate({**dict(settings), **values})


def members(annotation: Any) -> list[type[Settings]]:
    """List the settings classes within a type annotation (optional, tuple, union, annotated)."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    if get_origin(annotation) in (typing.Union, types.UnionType, tuple, typing.Annotated):
        return [found for arg in get_args(annotation) for found in members(arg)]
    return []


def kind_of(cls: type[Settings]) -> str | None:
    """Return the `kind` by which settings select a class among alternatives; None if it has no
    fixed one.
    """
    kind = cls.model_fields.get("kind")
    if kind is None:
        return getattr(cls, "kind", None)
    return None if kind.is_required() else str(kind.default)


def _by_name(path: tuple[str, ...], values: Any) -> tuple[str, ...]:
    """Convert a path to `--set` syntax, in which names replace the indices of list elements."""
    named: list[str] = []
    for part in path:
        below = values
        if isinstance(values, Mapping):
            below = values.get(part)
        elif isinstance(values, list | tuple) and part.isdigit() and int(part) < len(values):
            below = values[int(part)]
        elif isinstance(values, Settings):
            below = getattr(values, part, None)
        else:
            below = None
        name = below.get("name") if isinstance(below, Mapping) else getattr(below, "name", None)
        plain = isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) is not None
        named.append(str(name) if part.isdigit() and plain else part)
        values = below
    return tuple(named)


def _follows(item: Mapping[str, Any], items: list[dict[str, Any]]) -> bool:
    """Whether a "list too short" error only follows from invalid elements, which pydantic drops
    before it counts.
    """
    depth = len(item["loc"])
    return item["type"] == "too_short" and any(
        len(other["loc"]) > depth and other["loc"][:depth] == item["loc"] for other in items
    )


_PLAIN = re.compile(r"bool|int|float|str|literal\[.*\]")
"""Pydantic's names for alternatives that are plain values, not groups of settings."""


def _one_of_plain(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge pydantic's errors for the alternatives of one plain value (`bool | Literal["auto"]`)
    into one error.
    """
    found: dict[Any, dict[str, Any]] = {}
    for number, item in enumerate(items):
        loc = item["loc"]
        if len(loc) < 2 or not _PLAIN.fullmatch(str(loc[-1])):
            found[number] = item
        elif loc[:-1] in found:
            found[loc[:-1]]["expected"] += f", or {_expected(item)}"
        else:
            found[loc[:-1]] = {**item, "loc": loc[:-1], "expected": _expected(item)}
    return list(found.values())


def _describe(cls: type[Settings], item: Mapping[str, Any], values: Any) -> str:
    owner, kept = _walk(cls, tuple(item["loc"]))
    kept = _by_name(kept, values)
    path = ".".join(kept)
    match item["type"]:
        case "extra_forbidden":
            allowed = owner.model_fields if owner is not None else ()
            return f"no setting {path!r}; {nearest(kept[-1], allowed)}"
        case "missing":
            return f"setting {path!r} is required and was not given"
        case "union_tag_invalid":
            seen, tags = item["ctx"]["tag"], item["ctx"]["expected_tags"]
            close = nearest(str(seen), [tag.strip("' ") for tag in tags.split(",")])
            return f"{path}.kind = {str(seen)!r}: must be one of {tags}; {close}"
        case "union_tag_not_found":
            kinds = ", ".join(repr(kind_of(member)) for member in _alternatives(owner, kept[-1]))
            return f"setting '{path}.kind' is required; allowed: {kinds}"
        case "value_error":
            message = str(item["msg"]).removeprefix("Value error, ")
            return f"{path}: {message}" if path else message
    seen = item["input"]
    plain = isinstance(seen, str | int | float | bool | None) and not holds_credentials(seen)
    shown = f" = {seen!r}" if plain else ""
    return f"{path or cls.__name__}{shown}: {item.get('expected') or _expected(item)}"


def _expected(item: Mapping[str, Any]) -> str:
    match item["type"]:
        case "model_type" | "model_attributes_type" | "dict_type":
            return "is a group of settings, each set by its own name"
        case "tuple_type":
            return "is a list, written [a, b]"
        case "string_pattern_mismatch":
            return "must begin with a letter or digit and hold these and the signs . _ - alone"
    return str(item["msg"]).replace("Input should be", "must be")


def _alternatives(owner: type[Settings] | None, field: str) -> list[type[Settings]]:
    fields = owner.model_fields if owner is not None else {}
    return members(fields[field].annotation) if field in fields else []


def _walk(
    cls: type[Settings], loc: tuple[Any, ...]
) -> tuple[type[Settings] | None, tuple[str, ...]]:
    """Return the class that owns the setting at pydantic's location `loc`, and `loc` without union
    tags.

    Pydantic puts the tag of the alternative chosen between a field and the fields of its value.
    """
    owner: type[Settings] | None = cls
    current: list[type[Settings]] = [cls]
    kept: list[str] = []
    choosing = False
    for part in loc:
        if choosing and part in [kind_of(c) for c in current]:
            current, choosing = [c for c in current if kind_of(c) == part], False
            continue
        kept.append(str(part))
        if isinstance(part, int) or not current:
            continue
        owner = current[0] if len(current) == 1 else None
        field = owner.model_fields.get(part) if owner is not None else None
        current = members(field.annotation) if field is not None else []
        choosing = len(current) > 1
    return owner, tuple(kept)
