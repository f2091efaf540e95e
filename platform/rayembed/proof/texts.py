"""Choose the texts of a model's proof: at most 64, of kinds that servers are known to embed
wrongly.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import get_args
from unicodedata import normalize

from torch import nn

from rayembed.config.types import Role
from rayembed.errors import ConfigError, DataError
from rayembed.models.architecture import architecture_of
from rayembed.models.contract import Tokens, cost
from rayembed.models.loading.backbones import num_positions
from rayembed.models.transformer_model import TransformerModel
from rayembed.proof.proof import ProofText

NUMBER = 64
"""Largest number of texts."""

_ACCENTS = "Café in Zürich, ñandú, Huế, façade"
_SHORT = {
    "a question": "which birds can fly backwards?",
    "a passage": "Paris is the capital of France, and lies on the river Seine.",
    "CJK": "東京は日本の首都で、北京是中国的首都。",
    "Hangul": "고양이는 쥐를 먹는다",
    "Arabic": "القاهرة هي عاصمة مصر",
    "Devanagari": "दिल्ली भारत की राजधानी है",
    "Thai, without spaces": "กรุงเทพเป็นเมืองหลวงของไทย",
    "Cyrillic and Greek": "Москва и Αθήνα",
    "composed letters (NFC)": normalize("NFC", _ACCENTS),
    "combining marks (NFD)": normalize("NFD", _ACCENTS),
    "digits after the prompt": "7 wonders of the ancient world, 42 of them lost",
    "a sign after the prompt": "- list item; #hashtag (in brackets)",
    "near-empty": ".",
    "one letter": "a",
    "upper case": "NASA AND THE EU SIGNED A TREATY IN BERLIN",
    "mixed case": "iPhone SE vs. McDonald's: WHO wins, Apple or apple?",
    "white space": "  two  spaces,\ta tab\nand a line \n\n",
    "emoji": "good morning \U0001f44b\U0001f3fd from the \U0001f1eb\U0001f1ee team",
    "code": "def f(x): return [i**2 for i in x if i != 0]  # O(n)",
    "an address": "see https://example.org/a_b?c=d&e=%20f or mail me@example.org",
}
"""Short texts, by what each checks. Both roles get them."""

FOR_MISTAKES = (
    "a question",
    "digits after the prompt",
    "a passage",
    "upper case",
    "mixed case",
)
"""Short texts, in both roles, whose vectors under a mistake are kept first."""

_INSTRUCTIONS = 8
"""Instructions, beside the default of each role, that get texts; the first by name. A few get all
texts of `FOR_MISTAKES`, more get two."""
_FEW = 3
_LARGE = 2 * 10**9
"""Parameters from which a CPU computes so slowly that most texts are of one role."""

More = Callable[[TransformerModel], tuple[list[ProofText], list[str]]]
"""Function from a model to further texts, and sentences on those that are left out."""


def proof_texts(
    model: TransformerModel, instructions: Mapping[str, str], more: Iterable[More] = ()
) -> tuple[list[ProofText], list[str]]:
    """Return the texts of a model's proof, and sentences on those that are left out.

    Texts that its tokenizer refuses are none of them.

    Args:
        instructions: task definitions by name that the model was saved with.
        more: makers of further texts, for models that have positions up to their maximum length.
    """
    defaults = {model.instruction_of(role, None) for role in get_args(Role)}
    named = {i: n for n, i in sorted(instructions.items(), reverse=True) if i not in defaults}
    chosen = sorted(named.items(), key=lambda one: one[1])[:_INSTRUCTIONS]
    pairs = [(about, text, role) for about, text in _SHORT.items() for role in get_args(Role)]
    left_out = []
    if is_large(model):
        pairs = [one for i, one in enumerate(pairs) if one[0] in FOR_MISTAKES or i % 4 in (0, 3)]
        left_out.append(
            "most short texts in one of both roles: the model has "
            f"{num_parameters(model) / 1e9:.1f} billion parameters"
        )
    texts = []  # first, since the last ones make room for long texts
    for instruction, name in chosen:
        for about in FOR_MISTAKES if len(chosen) <= _FEW else FOR_MISTAKES[:2]:
            what = f"instruction {name}: {about}"
            texts.append(text_of(model, _SHORT[about], "query", instruction, what))
    texts += [text_of(model, text, role, None, about) for about, text, role in pairs]
    short = [text for text in texts if tokens_of(model, [text])]
    if not _has_positions(model):
        few = min(filter(None, map(num_positions, model.parts.values())), default=sys.maxsize) // 2
        return [text for text in short if _positions_of(model, text) <= few][:NUMBER], left_out
    long: list[ProofText] = []
    for make in more:
        made, why = make(model)
        long += made
        left_out += why
    return [*short[: NUMBER - len(long)], *long], left_out


def is_large(model: TransformerModel) -> bool:
    """Whether a model is so large that a CPU embeds few texts in minutes."""
    return num_parameters(model) >= _LARGE


def num_parameters(model: TransformerModel) -> int:
    """Number of a model's parameters except embeddings, which need no matrix product; 0 for
    graphs.
    """
    modules = [module for part in model.parts.values() for module in part.modules()]
    return sum(
        parameter.numel()
        for module in modules
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    )


def tokens_of(model: TransformerModel, texts: Iterable[ProofText]) -> list[Tokens]:
    """Tokenise each text after its prompt; return an empty list if the tokenizer refuses
    one.

    A text may have no token that the model knows, or its prompt may leave no room for it.
    """
    tokenizer = model.tokenizer
    try:
        return [tokenizer.with_prompts([text.text], [text.prompt], text.role)[0] for text in texts]
    except DataError:
        return []


def _has_positions(model: TransformerModel) -> bool:
    """Whether the model has position embeddings up to its stated maximum length."""
    if not model.parts:  # a graph
        return True
    try:
        architecture_of(model.config).check_lengths(model.config, model.parts)
    except ConfigError:
        return False
    return True


def _positions_of(model: TransformerModel, text: ProofText) -> int:
    return cost(tokens_of(model, [text])[0]) + model.added_tokens


def text_of(
    model: TransformerModel, text: str, role: Role, instruction: str | None, about: str
) -> ProofText:
    """Make a text of the proof with the model's prompt for its role and instruction."""
    prompt = model.tokenizer.prompt(model.instruction_of(role, instruction), role)
    return ProofText(text, role, prompt, instruction, about)
