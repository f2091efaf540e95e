"""The base of all settings: frozen, every name known, errors that name the nearest setting."""

import difflib
import types
import typing
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from rayembed.errors import ConfigError

SettingsT = TypeVar("SettingsT", bound="Settings")


class Settings(BaseModel):
    """A frozen group of settings; an unknown name or a value of the wrong type is refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )


def nearest(name: str, allowed: typing.Iterable[str]) -> str:
    """The end of an error message: the closest allowed name, or all of them."""
    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"allowed: {', '.join(names)}"


def parse(cls: type[SettingsT], values: Any) -> SettingsT:
    """Settings of the class `cls` from plain values.

    Raises:
        ConfigError: one line for each wrong setting, with its full path and the nearest name.
    """
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        lines = [_describe(cls, dict(item)) for item in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def _describe(cls: type[Settings], item: dict[str, Any]) -> str:
    loc = tuple(item["loc"])
    path = ".".join(str(part) for part in _without_tags(cls, loc))
    if item["type"] == "extra_forbidden":
        owner = _settings_at(cls, loc[:-1])
        hint = nearest(str(loc[-1]), owner.model_fields) if owner is not None else ""
        return f"no setting {path!r}; {hint}"
    if item["type"] == "missing":
        return f"setting {path!r} is required and was not given"
    if item["type"] == "union_tag_invalid":
        seen, allowed = item["ctx"]["tag"], item["ctx"]["expected_tags"]
        return f"{path}.kind = {seen!r} is not known; allowed: {allowed}"
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{path or cls.__name__} = {item['input']!r}: {message}" if path else message


def _members(annotation: Any) -> list[type[Settings]]:
    """The settings classes that an annotation (optional, tuple, union, annotated) can hold."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    if isinstance(annotation, typing.TypeAliasType if hasattr(typing, "TypeAliasType") else ()):
        return _members(annotation.__value__)
    if get_origin(annotation) in (typing.Union, types.UnionType, tuple, list, typing.Annotated):
        return [found for arg in get_args(annotation) for found in _members(arg)]
    return []


def _tag(cls: type[Settings]) -> str | None:
    kind = cls.model_fields.get("kind")
    return None if kind is None else str(kind.default)


def _walk(
    cls: type[Settings], loc: tuple[Any, ...]
) -> tuple[type[Settings] | None, tuple[Any, ...]]:
    """The class that holds the setting at `loc`, and `loc` without pydantic's union tags."""
    current: list[type[Settings]] = [cls]
    kept: list[Any] = []
    for part in loc:
        by_tag = [c for c in current if _tag(c) == part]
        if len(current) > 1 and by_tag:
            current = by_tag
            continue
        kept.append(part)
        if isinstance(part, int):
            continue
        fields = [c.model_fields[part] for c in current if part in c.model_fields]
        if not fields:
            continue
        current = _members(fields[0].annotation) or current
    return (current[0] if len(current) == 1 else None), tuple(kept)


def _settings_at(cls: type[Settings], loc: tuple[Any, ...]) -> type[Settings] | None:
    return _walk(cls, loc)[0]


def _without_tags(cls: type[Settings], loc: tuple[Any, ...]) -> tuple[Any, ...]:
    return _walk(cls, loc)[1]
