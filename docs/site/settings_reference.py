"""Reference of all settings, as Markdown pages: one for each kind of file and table of kinds."""

import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import rayembed_extras
from rayembed.config import data_steps, loss, mining, model, optimizer, sources
from rayembed.config.evaluation import EvaluationRun
from rayembed.config.run import Run
from rayembed.config.settings import Settings, kind_of, members
from rayembed.config.table import SettingsTable, load
from rayembed.jobs.table import JOBS
from rayembed.recipes.catalogue import get_recipe, recipe_names

_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
_MOST_RECIPES = 6


@dataclass
class Page:
    """A page of the reference and the settings classes that it describes."""

    name: str
    title: str
    about: str
    classes: list[type[Settings]] = field(default_factory=list)


def pages() -> dict[str, str]:
    """Markdown of each page of the reference by its file name below `reference/settings/`."""
    made = [*_tables(), *_documents()]
    homes = {cls: page for page in made for cls in page.classes}
    for page in made:
        for cls in page.classes:  # the list grows while it is read
            for below in _below(cls):
                if homes.setdefault(below, page) is page and below not in page.classes:
                    page.classes.append(below)
    used = _uses()
    written = {f"{page.name}.md": "\n".join(_page(page, homes, used)) for page in made}
    index = [f"- [{page.title}]({page.name}.md): {page.about}" for page in made]
    head = [
        "# Settings",
        "",
        "`--set path.to.setting=value` changes a setting of a recipe, and `--dry-run` prints all of"
        " a run as YAML. These pages list every setting with its default and the recipes that"
        " change it.",
        "",
    ]
    return {"index.md": "\n".join([*head, *index, ""]), **written}


def _tables() -> list[Page]:
    """Pages of tables whose members are chosen by `kind`."""
    known = {
        "architectures": (model.ARCHITECTURES, "Architectures", "`model` of a run"),
        "losses": (loss.LOSSES, "Losses", "`loss` of a stage"),
        "optimizers": (optimizer.OPTIMIZERS, "Optimisers", "`optimizer` of a stage"),
        "schedules": (optimizer.SCHEDULES, "Schedules", "`schedule` of an optimiser"),
        "sources": (sources.SOURCES, "Sources", "`source` of a data set"),
        "mining_rules": (mining.MINING_RULES, "Mining rules", "`rule` of a data set's mining"),
        "mining_searches": (mining.MINING_SEARCHES, "Searches", "`search` of mining"),
        "data_steps": (data_steps.STEPS, "Data steps", "settings of a data set by their names"),
    }
    return [
        Page(name, title, about, list(table.classes().values()))
        for name, (table, title, about) in [*known.items(), *_outside_tables(known)]
    ]


def _outside_tables(
    known: typing.Container[str],
) -> Iterator[tuple[str, tuple[SettingsTable, str, str]]]:
    """Tables of the optional features."""
    for module in _modules(rayembed_extras):
        for value in vars(module).values():
            name = value.group.rpartition(".")[2] if isinstance(value, SettingsTable) else None
            if name is not None and name not in known:
                title = name.replace("_", " ").capitalize()
                yield name, (value, title, f"kinds of {title.lower()}")


def _documents() -> list[Page]:
    """Pages of the settings that jobs read, those of the training run first."""
    # The training job builds its reader when it knows its recipe.
    found: dict[type[Settings], list[str]] = {Run: ["`rayembed train`", "`rayembed adapt`"]}
    for name, command in JOBS.members().items():
        kind = getattr(getattr(load(command.job), "read", None), "kind", None)
        if kind is not None:
            found.setdefault(kind, []).append(f"`rayembed {name}`")
    made = []
    for cls in sorted(found, key=lambda cls: (cls not in (Run, EvaluationRun), cls.__name__)):
        title = "Training run" if cls is Run else _words(cls).capitalize()
        name = title.lower().replace(" ", "_")
        made.append(Page(name, title, f"read by {', '.join(found[cls])}", [cls]))
    return made


@cache
def _modules(package: Any) -> tuple[Any, ...]:
    names = [name for _, name, _ in walk_packages(package.__path__, f"{package.__name__}.")]
    return tuple(import_module(name) for name in names if name.endswith("settings"))


def _below(cls: type[Settings]) -> Iterator[type[Settings]]:
    for each in cls.model_fields.values():
        yield from _members(each.annotation)


def _members(annotation: Any) -> list[type[Settings]]:
    if get_origin(annotation) is dict:
        return [one for arg in get_args(annotation) for one in _members(arg)]
    return members(annotation)


def _page(page: Page, homes: dict[type[Settings], Page], used: "Uses") -> Iterator[str]:
    yield f"# {page.title}"
    yield ""
    yield f"{page.about[:1].upper()}{page.about[1:].rstrip('.')}."
    for cls in page.classes:
        kind = kind_of(cls)
        yield f"\n## {_heading(cls)} {{#{_anchor(cls)}}}\n"
        yield _paragraph(cls.__doc__)
        if kind is not None and (recipes := used.kinds.get(cls)):
            yield f"\nRecipes: {_recipes(recipes)}."
        fields = {name: one for name, one in cls.model_fields.items() if name != "kind"}
        if fields:
            yield "\n| Setting | Type | Default | Meaning |\n| --- | --- | --- | --- |"
        for name, one in fields.items():
            meaning = _paragraph(one.description)
            if recipes := used.settings.get((cls, name)):
                meaning += f" *Changed by* {_recipes(recipes)}."
            cells = (f"`{name}`", _type(one, homes, page), _default(one), meaning)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@dataclass
class Uses:
    """Recipes by the kinds that they choose and the settings whose defaults they change."""

    kinds: dict[type[Settings], list[str]] = field(default_factory=dict)
    settings: dict[tuple[type[Settings], str], list[str]] = field(default_factory=dict)


def _uses() -> Uses:
    used = Uses()
    for name in recipe_names():
        kinds, changed = set(), set()
        for group in _groups(get_recipe(name)):
            cls = type(group)
            kinds.add(cls)
            for setting, one in cls.model_fields.items():
                if setting != "kind" and _differs(getattr(group, setting), one):
                    changed.add((cls, setting))
        for cls in kinds:
            used.kinds.setdefault(cls, []).append(name)
        for key in changed:
            used.settings.setdefault(key, []).append(name)
    return used


def _differs(value: Any, one: FieldInfo) -> bool:
    """Whether a setting has another value than its default; of groups of settings, another kind."""
    if one.is_required():
        return False
    default = one.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Settings) and isinstance(default, Settings):
        return type(value) is not type(default)
    return bool(value != default)


def _groups(value: Any) -> Iterator[Settings]:
    if isinstance(value, Settings):
        yield value
        value = [getattr(value, name) for name in type(value).model_fields]
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _groups(one)


def _recipes(names: Iterable[str]) -> str:
    found = [f"`{name}`" for name in names]
    shown = found if len(found) <= _MOST_RECIPES + 1 else found[:_MOST_RECIPES]
    more = len(found) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _type(one: FieldInfo, homes: dict[type[Settings], Page], page: Page) -> str:
    bounds = [
        f"{sign} {getattr(item, name)}"
        for item in one.metadata
        for name, sign in _BOUNDS.items()
        if getattr(item, name, None) is not None
    ]
    return " ".join([_annotation(one.annotation, homes, page), *bounds])


def _annotation(annotation: Any, homes: dict[type[Settings], Page], page: Page) -> str:  # noqa: PLR0911 - one return a type
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return _annotation(args[0], homes, page)
    if origin is typing.Literal:
        return " or ".join(f"`{arg}`" for arg in args)
    if origin in (typing.Union, types.UnionType):
        parts = [_annotation(arg, homes, page) for arg in args]
        if len(parts) > _MOST_RECIPES and all(members(arg) for arg in args):
            home = homes[members(args[0])[0]]
            return f"[{home.title.lower()}]({home.name}.md)"
        return " or ".join(dict.fromkeys(parts))
    if origin is tuple:
        return "list of " + " and ".join(
            dict.fromkeys(_annotation(arg, homes, page) for arg in args if arg is not Ellipsis)
        )
    if origin is dict:
        return f"mapping to {_annotation(args[1], homes, page)}"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        home = homes[annotation]
        file = "" if home is page else f"{home.name}.md"
        return f"[{_heading(annotation)}]({file}#{_anchor(annotation)})"
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(one: FieldInfo) -> str:  # noqa: PLR0911 - one return a type
    if one.is_required():
        return "*required*"
    value = one.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or isinstance(value, Settings):
        return f"`{kind_of(type(value))}`" if kind_of(type(value)) else "its defaults"
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        if any(isinstance(item, Settings) for item in value):
            return ", ".join(f"`{kind_of(type(item)) or item}`" for item in value)
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if value != "" else "empty"


def _heading(cls: type[Settings]) -> str:
    kind = kind_of(cls)
    return f"`{kind}`" if kind is not None else _words(cls)


def _anchor(cls: type[Settings]) -> str:
    return f"{cls.__module__.rpartition('.')[2]}-{cls.__name__}".lower().replace("_", "-")


def _words(cls: type[Any]) -> str:
    name = cls.__name__.removesuffix("Config").removesuffix("Settings")
    words = "".join(f" {sign.lower()}" if sign.isupper() else sign for sign in name).strip()
    return words or cls.__name__


def _first(cls: type[Any]) -> str:
    return _paragraph(cls.__doc__).partition(". ")[0]


def _paragraph(text: str | None) -> str:
    return " ".join((text or "").split())
