"""YAML of runs, as written by `Document.to_yaml` and by users.

Scalars stay text, only `null` is read: the type of the setting decides what a text means. YAML 1.1
would read `2e-5` as text, `no` as false, `1.10` as 1.1 and `2024-01-01` as a date.
"""

import re
from typing import Any

import yaml


class _TextLoader(yaml.SafeLoader):
    """Loader of mappings, lists, null and text; duplicate names are errors."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - the base class declares it so

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Mapping of a node, whose names must be unique texts."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a name of a setting must be a text", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the name {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_TextLoader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$"), ["~", "n", ""]
)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes and escapes texts with line breaks and other unprintable characters.

    Each value stands on one line, and PyYAML does not fold breaks such as U+0085 into spaces.
    """


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def read_yaml(text: str) -> Any:
    """Mappings, lists, texts and None of a YAML document.

    Raises:
        yaml.YAMLError: not YAML, or a name given twice.
    """
    return yaml.load(text, Loader=_TextLoader)


def write_yaml(values: Any) -> str:
    """YAML of plain values in their order, one value a line."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)
