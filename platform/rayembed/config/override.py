"""Overrides of single settings: `--set path.to.setting=value`."""

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

import yaml

from rayembed.config.credentials import without_credentials
from rayembed.config.document import read_yaml
from rayembed.config.settings import Settings, SettingsT, kind_of, members, nearest, parse
from rayembed.errors import ConfigError


def override(run: SettingsT, assignments: Sequence[str]) -> SettingsT:
    """Apply `path.to.setting=value` overrides to a run, one after the other.

    The setting's type says how the value is read: a single value is what stands after `=`, to the
    last character (`null` where the setting may be None); a list or a group is YAML; where it may
    be a text or a list, what begins with `[` is the list. Elements of
    lists are named by their index or by their `name` (`stages.blend.steps=10`). Setting the `kind`
    of an alternative drops the settings of the former one; setting below a group that is null
    starts from the group's defaults; a setting that `replaces` another one makes what the run says
    of it null.

    Raises:
        ConfigError: not an assignment, an unknown path (with the nearest name), a wrong value, or
            two settings of which one replaces the other.
    """
    return overridden(type(run), run.model_dump(mode="json"), assignments)


def overridden(
    kind: type[SettingsT], values: dict[str, Any], assignments: Sequence[str]
) -> SettingsT:
    """Apply overrides to plain values, which may be incomplete without them, and validate the
    result.

    Args:
        values: by their names; changed in place.
        assignments: as in `override`.

    Raises:
        ConfigError: as `override`.
    """
    assign_all(kind, values, assignments)
    return parse(kind, values)


def assign_all(kind: type[Settings], values: dict[str, Any], assignments: Sequence[str]) -> None:
    """Write the values of `path=value` assignments into plain settings, without validating
    them.

    Args:
        values: changed in place.

    Raises:
        ConfigError: as `override`, of the assignments.
    """
    given: dict[tuple[Any, ...], str] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            shown = without_credentials(assignment)
            raise ConfigError(f"--set {shown!r}: expected path.to.setting=value")
        place, replaces, value = _assign(kind, values, path, text)
        given.pop(place, None)
        if value is not None:
            given[place] = assignment
        for pair in replaces.items():
            both = [given[each] for each in ((*place[:-1], key) for key in pair) if each in given]
            if len(both) == 2:
                raise ConfigError(
                    f"{' and '.join(both)} are both given, but one would replace the other; leave "
                    "one of them out"
                )


def _assign(
    cls: type[Settings], values: dict[str, Any], path: str, text: str
) -> tuple[tuple[Any, ...], Mapping[str, str], Any]:
    """Assign the value at a path; return the path's keys, the settings that it replaces, and the
    value.
    """
    here: Any = values
    place: list[Any] = []
    annotation: Any = cls
    parts = path.split(".")
    while True:
        key, below, parts = _step(here, annotation, path, parts)
        place.append(key)
        if not parts:
            break
        if isinstance(here, dict) and key not in here:  # of a group that was null
            here[key] = _default(_chosen(here, annotation), key)
        if here[key] is None and members(below):
            here[key] = {}
        if isinstance(here[key], str) and members(below):  # the kind alone
            here[key] = {"kind": here[key]}
        if not isinstance(here[key], dict | list):
            prefix = path.removesuffix("." + ".".join(parts))
            raise ConfigError(
                f"no setting {path!r}: {prefix!r} is a single value without settings below it"
            )
        here, annotation = here[key], below
    value = _read(path, text, below)
    if key == "kind" and kind_of(_chosen(here, annotation)) != value:
        here.clear()
    here[key] = value
    if not isinstance(here, dict) or get_origin(annotation) is dict:
        return tuple(place), {}, value
    replaces = _chosen(here, annotation).replaces
    if key in replaces:
        here[replaces[key]] = None
    return tuple(place), replaces, value


def _step(here: Any, annotation: Any, path: str, parts: list[str]) -> tuple[Any, Any, list[str]]:
    """Resolve the first part of a path in the settings group `here`: its key, the type of its
    value, and the rest of the path.
    """
    part, rest = parts[0], parts[1:]
    prefix = path.removesuffix(".".join(parts)) + part
    if isinstance(here, list):
        types_below = get_args(annotation)
        return _index(here, part, prefix), types_below[0], rest
    if get_origin(annotation) is dict:  # names that the user chose, dots included
        return ".".join(parts), get_args(annotation)[1], []
    owner = _chosen(here, annotation)
    if part not in owner.model_fields:
        raise ConfigError(f"no setting {prefix!r}; {nearest(part, owner.model_fields)}")
    return part, owner.model_fields[part].annotation, rest


def _default(owner: type[Settings], name: str) -> Any:
    """Default value of a setting as a plain value; None if it is required."""
    field = owner.model_fields[name]
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return default.model_dump(mode="json") if isinstance(default, Settings) else default


def _chosen(here: dict[str, Any], annotation: Any) -> type[Settings]:
    """Settings class of a group; if the group has alternatives, the class that its `kind` names."""
    classes = members(annotation)
    return next((c for c in classes if kind_of(c) == here.get("kind")), classes[0])


def _index(items: list[Any], part: str, prefix: str) -> int:
    names = [item["name"] for item in items if isinstance(item, dict) and "name" in item]
    if part in names:
        return names.index(part)
    if part.isdecimal() and int(part) < len(items):
        return int(part)
    allowed = names or [str(index) for index in range(len(items))]
    raise ConfigError(f"there is no element {prefix!r}; {nearest(part, allowed)}")


def _read(path: str, text: str, annotation: Any) -> Any:
    """Parse a text as the value of a setting of this type."""
    if text == "null" and type(None) in get_args(annotation):
        return None
    if not _holds_several(annotation) or (_holds_text(annotation) and not text.startswith("[")):
        return text
    try:
        return read_yaml(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or error
        raise ConfigError(
            f"--set {path}={without_credentials(text)}: the value is not YAML: {problem}; put "
            "quotes around texts that contain one of ?:,#[]{} inside lists and groups"
        ) from None


def _holds_several(annotation: Any) -> bool:
    if members(annotation) or get_origin(annotation) in (dict, tuple):
        return True
    return any(map(_holds_several, _alternatives(annotation)))


def _holds_text(annotation: Any) -> bool:
    return annotation is str or any(map(_holds_text, _alternatives(annotation)))


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    either = get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated)
    return get_args(annotation) if either else ()
