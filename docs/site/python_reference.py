"""Reference of the Python interface, as Markdown: signatures and docstrings."""

import logging
from collections.abc import Iterator
from functools import cache

import griffe

FACE = {
    "Calls": ["train", "adapt", "evaluate", "mine", "load", "encode"],
    "What they return": ["Trained", "Embedder"],
    "Callbacks": ["training.trainer.Callback", "api.callbacks.Evaluate"],
    "Losses": [
        "config.loss.LossConfig",
        "losses.contract.Contrastive",
        "losses.contract.Pairwise",
        "losses.contract.Candidates",
    ],
    "Sources of rows": ["config.sources.Source", "config.sources.FileSource"],
    "Data steps": ["config.data_steps.DataStep"],
    "Optimisers": ["config.optimizer.OptimizerConfig", "config.optimizer.ScheduleConfig"],
    "Architectures": [
        "config.architecture.ArchitectureConfig",
        "models.contract.EmbeddingModel",
        "models.contract.EmbedOutput",
    ],
    "Jobs": ["jobs.table.Command", "pipeline.job.Job", "pipeline.job.Reader"],
    "Errors": ["errors"],
}
"""What is public, by heading: names of the package `rayembed`."""


def page() -> str:
    """Markdown of `reference/python.md`."""
    lines = [
        "# Python",
        "",
        "The calls of `import rayembed`, and the base classes that extensions derive from."
        " [rayembed in Python](../python.md) is the guide.",
    ]
    for heading, names in FACE.items():
        lines += [f"\n## {heading}"]
        for name in names:
            lines += _object(f"rayembed.{name}", _package()[name], 3)
    return "\n".join(lines) + "\n"


@cache
def _package() -> griffe.Object | griffe.Alias:
    logging.getLogger("griffe").setLevel(logging.ERROR)
    return griffe.load("rayembed", docstring_parser="google", resolve_aliases=True)


def _object(shown: str, found: griffe.Object | griffe.Alias, level: int) -> Iterator[str]:
    yield f"\n{'#' * level} `{shown}` {{#{shown.replace('.', '-')}}}\n"
    if found.is_function or found.is_class:
        yield f"```python\n{_signature(shown, found)}\n```\n"
    yield from _docstring(found)
    if found.is_class or found.is_module:
        attributes = [one for one in found.members.values() if _is_public(one) and _is_value(one)]
        if attributes:
            yield "\n| | |\n| --- | --- |"
        for one in attributes:
            text = " ".join(one.docstring.value.split()) if one.docstring else ""
            yield f"| `{one.name}` | {text.replace('|', chr(92) + '|')} |"
        for name, one in found.members.items():
            if _is_public(one) and not _is_value(one):
                yield from _object(f"{shown.rpartition('.')[2]}.{name}", one, level + 1)


def _is_public(one: griffe.Object | griffe.Alias) -> bool:
    return not one.is_alias and not one.name.startswith("_") and one.docstring is not None


def _is_value(one: griffe.Object | griffe.Alias) -> bool:
    return one.is_attribute


def _signature(shown: str, found: griffe.Object | griffe.Alias) -> str:
    name = shown.rpartition(".")[2]
    if found.is_class:
        bases = ", ".join(str(base) for base in found.bases)
        return f"class {name}({bases})" if bases else f"class {name}"
    parts, keyword_only = [], False
    for one in found.parameters:
        if one.name in ("self", "cls"):
            continue
        if one.kind is griffe.ParameterKind.keyword_only and not keyword_only:
            keyword_only = True
            parts.append("*")
        text = f"{one.name}: {one.annotation}" if one.annotation else one.name
        parts.append(f"{text} = {one.default}" if one.default is not None else text)
    inside = ", ".join(parts)
    if len(inside) > 70:
        inside = "\n    " + ",\n    ".join(parts) + ",\n"
    returned = f" -> {found.returns}" if found.returns else ""
    return f"def {name}({inside}){returned}"


def _docstring(found: griffe.Object | griffe.Alias) -> Iterator[str]:
    if found.docstring is None:
        return
    for section in found.docstring.parsed:
        match section.kind:
            case griffe.DocstringSectionKind.text:
                yield section.value
            case griffe.DocstringSectionKind.parameters:
                yield "\n| Argument | |\n| --- | --- |"
                for one in section.value:
                    yield f"| `{one.name}` | {_cell(one.description)} |"
            case griffe.DocstringSectionKind.raises:
                yield "\n| Raises | |\n| --- | --- |"
                for one in section.value:
                    yield f"| `{one.annotation}` | {_cell(one.description)} |"
            case _:
                yield str(section.value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
