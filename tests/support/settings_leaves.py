"""Every single setting of a run, found by walking it, and another valid value for each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from rayembed.config.data_steps import Cleaner, DataStep
from rayembed.config.reports import MIRRORS
from rayembed.config.settings import Settings, kind_of, members


@dataclass(frozen=True)
class Leaf:
    """A setting that is a single value (or a list of them), with its type."""

    path: tuple[str | int, ...]
    annotation: Any
    value: Any

    @property
    def dotted(self) -> str:
        return ".".join(str(part) for part in self.path)


def leaves(settings: Settings, path: tuple[str | int, ...] = ()) -> Iterator[Leaf]:
    for name, field in type(settings).model_fields.items():
        value, here = getattr(settings, name), (*path, name)
        if _is_a_kind(value):
            yield Leaf(here, field.annotation, value)
        elif isinstance(value, Settings):
            yield from leaves(value, here)
        elif isinstance(value, tuple) and value and isinstance(value[0], Settings):
            for index, item in enumerate(value):
                yield from leaves(item, (*here, index))
        elif isinstance(value, dict):
            arg = get_args(field.annotation)[1]
            yield from (Leaf((*here, key), arg, item) for key, item in value.items())
        else:
            yield Leaf(here, field.annotation, value)


def groups(
    settings: Settings, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Settings]]:
    """Every group of settings of a run with its path, the run itself first."""
    yield path, settings
    for name in type(settings).model_fields:
        value, here = getattr(settings, name), (*path, name)
        if isinstance(value, Settings) and not _is_a_kind(value):
            yield from groups(value, here)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                if isinstance(item, Settings):
                    yield from groups(item, (*here, index))


def other_value(leaf: Leaf) -> Any:  # noqa: PLR0911 - one return a type
    """A valid value that differs; None where the type admits no other."""
    choices = _choices(leaf.annotation)
    if choices:
        if isinstance(leaf.value, tuple):
            return [choice for choice in choices if choice not in leaf.value]
        others = [choice for choice in choices if choice != leaf.value]
        others += [True] if bool in get_args(leaf.annotation) else []
        others += [1] if any(int in get_args(one) for one in get_args(leaf.annotation)) else []
        return others[0] if others else None
    if _is_a_kind(leaf.value):
        kinds = [kind_of(member) for member in members(leaf.annotation)]
        return next(kind for kind in kinds if kind != leaf.value.kind)
    match leaf.value:
        case bool():
            return not leaf.value
        case int():
            return leaf.value + 1
        case float():
            return leaf.value / 2 if leaf.value else 0.05
        case str():
            return leaf.value + "x"
        case tuple() if members(leaf.annotation):
            return [smallest(members(leaf.annotation)[0])]
        case tuple() if leaf.path[-1] == "mirrors":  # names of a table
            return [*MIRRORS.members()] or None
        case tuple() if "int" in str(leaf.annotation):
            return [*leaf.value, 1]
        case tuple():
            return [*leaf.value, "x"] if get_args(leaf.annotation)[-1] is Ellipsis else [0.5, 0.5]
        case None:  # of names of a table none
            is_named = leaf.path[-1] == "findings"
            return [] if is_named else _instead_of_none(leaf.annotation)
    raise AssertionError(f"no other value for {leaf}")


def _is_a_kind(value: Any) -> bool:
    """Whether a group without settings of its own is written as its kind alone."""
    return isinstance(value, Settings) and isinstance(value.model_dump(mode="json"), str)


def _choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((c for c in map(_choices, get_args(annotation)) if c), ())


def _instead_of_none(annotation: Any) -> Any:
    if members(annotation):
        return smallest(members(annotation)[0])
    return _of_type(annotation)


def smallest(cls: type[Settings]) -> dict[str, Any]:
    """A value of each setting of the class that has no default, and its kind among alternatives."""
    required = {n: f.annotation for n, f in cls.model_fields.items() if f.is_required()}
    # Settings name a step of a data set, and a removal of its cleaning, by their own name.
    is_named = issubclass(cls, DataStep | Cleaner)
    kind = {} if is_named or kind_of(cls) is None else {"kind": kind_of(cls)}
    return kind | {name: _of_type(annotation) for name, annotation in required.items()}


def _of_type(annotation: Any) -> Any:
    if members(annotation):
        return smallest(members(annotation)[0])
    kinds = str(annotation)
    if "tuple" in kinds:
        return ["x"]
    if "str" in kinds or "Column" in kinds:
        return "x"
    return 3 if "int" in kinds else 0.5


def put(values: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Change one value of a dumped run in place."""
    for part in path[:-1]:
        values = values[part]
    values[path[-1]] = value
