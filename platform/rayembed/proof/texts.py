"""Choose the texts of a model's proof: at most 64, of kinds that servers are known to embed
wrongly.
"""

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, get_args
from unicodedata import normalize

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
_LONGER = (300, 600)
"""Tokens of documents that are not cut, for servers that cut at 256 or 512."""
_MOST_TOKENS = 6_144
"""Tokens of all texts around the limit: of a long limit fewer are embedded, so that a proof of a
small model takes a CPU seconds."""
_WINDOW = 60
"""Characters around an estimate among which a text of an exact number of tokens is searched."""

_NOUNS = "river stone winter market engine letter garden signal copper window theory island harvest"
_PLACES = "bridge music paper forest doctor colour station mirror history planet silver kitchen"


def proof_texts(model: TransformerModel, instructions: Mapping[str, str]) -> list[ProofText]:
    """Return the texts of a model's proof; those that its tokenizer refuses are left out.

    Args:
        instructions: task definitions by name that the model was saved with.
    """
    defaults = {model.instruction_of(role, None) for role in get_args(Role)}
    named = {i: n for n, i in sorted(instructions.items(), reverse=True) if i not in defaults}
    chosen = sorted(named.items(), key=lambda one: one[1])[:_INSTRUCTIONS]
    pairs = [(about, text, role) for about, text in _SHORT.items() for role in get_args(Role)]
    texts = [_made(model, text, role, None, about) for about, text, role in pairs]
    for instruction, name in chosen:
        for about in FOR_MISTAKES if len(chosen) <= _FEW else FOR_MISTAKES[:2]:
            what = f"instruction {name}: {about}"
            texts.append(_made(model, _SHORT[about], "query", instruction, what))
    short = [text for text in texts if tokens_of(model, [text])]
    if not _has_positions(model):
        few = min(filter(None, map(num_positions, model.parts.values())), default=sys.maxsize) // 2
        return [text for text in short if _positions_of(model, text) <= few][:NUMBER]
    long = [*_around_the_limit(model), *_longer(model)]
    return [*short[: NUMBER - len(long)], *long]


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


def _made(
    model: TransformerModel, text: str, role: Role, instruction: str | None, about: str
) -> ProofText:
    tokenizer = model.tokenizer
    prompt = tokenizer.prompt(model.instruction_of(role, instruction), role)
    return ProofText(text, role, prompt, instruction, about)


def _around_the_limit(model: TransformerModel) -> Iterator[ProofText]:
    """Yield texts of each role that are one token below the maximum length, equal to it and one
    above it.
    """
    tokenizer = model.tokenizer
    left = _MOST_TOKENS
    for extra, role in ((e, r) for e in (1, 0, -1) for r in get_args(Role)):
        limit = tokenizer.max_lengths[role]
        left -= min(limit, limit + extra)
        if left < 0:
            return
        name = f"limit {'+' if extra > 0 else '-'} 1" if extra else "limit"
        yield from _of_length(model, role, limit + extra, f"{role} of {name} tokens")


def _longer(model: TransformerModel) -> Iterator[ProofText]:
    """Yield documents of more than 256 and more than 512 tokens, if the model reads them without
    cutting.
    """
    tokenizer = model.tokenizer
    for number in _LONGER:
        if tokenizer.max_lengths["document"] > number:
            yield from _of_length(model, "document", number, f"document of {number} tokens")


def _of_length(model: TransformerModel, role: Role, number: int, about: str) -> Iterator[ProofText]:
    """Yield a text with exactly this number of tokens, prompt and special tokens included; yield
    nothing if none is found.
    """
    tokenizer: Any = copy.copy(model.tokenizer)
    tokenizer.max_lengths = dict.fromkeys(get_args(Role), sys.maxsize)
    prompt = tokenizer.prompt(model.instruction_of(role, None), role)

    def lengths(cuts: Sequence[int]) -> list[int]:
        texts = [_story(cut) for cut in cuts]
        try:
            made = tokenizer.with_prompts(texts, [prompt] * len(texts), role)
        except DataError:
            return []
        return [cost(tokens) for tokens in made]

    low, high = 1, 16 * number
    while high - low > 1:
        middle = (low + high) // 2
        seen = lengths([middle])
        if not seen:
            return
        low, high = (middle, high) if seen[0] < number else (low, middle)
    near = range(max(1, low - _WINDOW // 2), low + _WINDOW)
    for cut, length in zip(near, lengths(near), strict=False):
        if length == number and _story(cut).strip():
            yield ProofText(_story(cut), role, prompt, None, about)
            return


def _story(characters: int) -> str:
    """Make a text of this number of characters, in which no sentence occurs twice."""
    nouns, places = _NOUNS.split(), _PLACES.split()
    made, size = [], 0
    for number in count(1):
        noun, place = nouns[number % len(nouns)], places[number % len(places)]
        made.append(f"The {noun} of {number} was near a {place}, and so it went on. ")
        size += len(made[-1])
        if size >= characters:
            break
    return "".join(made)[:characters]
