"""Build the literal prompts before texts from prefixes, instructions and templates."""

from collections.abc import Iterable, Sequence

from rayembed.errors import ConfigError


def literal_prompt(instruction: str, prefix: str, template: str | None) -> str:
    """Build the literal prompt before a text from its role's prefix and its instruction.

    Args:
        instruction: "" for none.
        template: with one `{instruction}`, which takes the prefix's place; None: the instruction
            stands behind the prefix as plain text.
    """
    if template is None:
        return plain_head(prefix, instruction)
    return template.replace("{instruction}", instruction) if instruction else prefix


def plain_head(prefix: str, instruction: str) -> str:
    """Build a bi-encoder's literal prompt: the role's prefix followed by the instruction.

    A space stands behind an instruction unless it ends in white space itself.
    """
    return prefix + _spaced(instruction)


def instruction_with_examples(
    template: str, instruction: str, examples: Sequence[tuple[str, str]]
) -> str:
    """Build an instruction that holds in-context examples, each expanded from the template, before
    the original instruction.

    So a model that takes instructions takes examples too, wherever it runs. Each example is its
    query behind the template, `Response: ` and its positive, with an empty line behind it, much as
    in bge-en-icl (arXiv 2409.15700, section 3.1).

    Args:
        template: `model.instruction_template`.
        examples: pairs of a query and its positive, in their order.
    """
    before, _, behind = template.partition("{instruction}")
    shown = [
        f"{instruction}{_spaced(behind)}{query}\nResponse: {positive}\n\n{before}"
        for query, positive in examples
    ]
    return "".join(shown) + instruction


def _spaced(text: str) -> str:
    """Append a space to the text, unless it is empty or ends in white space."""
    return text + " " if text and not text[-1].isspace() else text


def instruction_in(head: str, template: str) -> str:
    """Extract the instruction from a literal prompt that the template produced; empty if it does
    not match.

    Args:
        head: literal text before a query.
    """
    before, mark, behind = template.partition("{instruction}")
    fits = bool(mark) and head.startswith(before) and head.endswith(behind)
    if not fits or len(head) < len(before) + len(behind):
        return ""
    return head[len(before) : len(head) - len(behind)]


def check_template(template: str) -> str:
    """Check and return the template; raise unless it has exactly one `{instruction}` and no other
    braces.

    Raises:
        ValueError: it has not.
    """
    if "{instruction}" not in template:
        raise ValueError(f"{template!r} lacks '{{instruction}}'")
    rest = template.replace("{instruction}", "", 1)
    if "{" in rest or "}" in rest:
        raise ValueError(f"{template!r} may have no braces except one '{{instruction}}'")
    return template


def check_prompt_names(names: Iterable[str]) -> None:
    """Raise if a saved instruction has the name of a role, `query` or `document`.

    Raises:
        ConfigError: one is `query` or `document`.
    """
    for name in names:
        if name in ("query", "document"):
            raise ConfigError(
                f"an instruction cannot be saved under the name {name!r}: sentence-transformers "
                f"and mteb use a saved prompt of that name for every {name} without a prompt of "
                "its own; rename the data set"
            )
