"""Make texts of an exact number of tokens for a model's proof, to notice where a server cuts.

Long texts cost most of the time of a proof, so they are chosen by the operations that they take.
"""

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, get_args

from rayembed.config.types import Role
from rayembed.errors import DataError
from rayembed.models.contract import cost
from rayembed.models.transformer_model import TransformerModel
from rayembed.proof.proof import ProofText
from rayembed.proof.texts import num_parameters, text_of

LENGTHS = (300, 600, 1_280, 2_560, 5_120)
"""Tokens of documents that are not cut, about a quarter more than the lengths at which servers
cut."""

MOST_OPERATIONS = 7e12
"""Floating-point operations that the long texts of a proof may take: about a minute on two CPU
cores."""
_TOKENS_OF_LARGE = 640
"""Tokens for which there are operations in any case: of models above 5 billion parameters."""
_MOST_TOKENS = 20_000
"""Tokens of all long texts: some 90 kB."""
_GRAPH = 10**8
"""Parameters assumed of a graph, which does not say its own."""

_WINDOW = 60
"""Characters around an estimate among which a text of an exact number of tokens is searched."""
_FIRST_SUBJECT = 400
"""Characters after which a text changes its subject for the first time, and then whenever it is
twice as long: so a cut changes the mean over tokens, too."""

_NOUNS = "river stone winter market engine letter garden signal copper window theory island harvest"
_PLACES = "bridge music paper forest doctor colour station mirror history planet silver kitchen"
_SUBJECTS = (
    "The {noun} of {number} was near a {place}, and so it went on. ",
    "Lawyer {number} told the court that the {noun} broke the contract about a {place}. ",
    "Mix {number} grams of flour with the {noun}, add butter and bake it in the {place}. ",
    "Patient {number} had a fever after the {noun} and was given antibiotics in the {place}. ",
    "Striker {number} scored for the {noun} team and won the cup against the {place}. ",
    "Telescope {number} saw the {noun} galaxy far behind the stars of the {place}. ",
    "Bank {number} raised the interest of the {noun} loan and sold shares of the {place}. ",
)


def long_texts(model: TransformerModel) -> tuple[list[ProofText], list[str]]:
    """Return texts around the maximum length and at usual lengths below it, and a sentence on those
    that are left out.

    The longest that is affordable comes first, since a cut at any length changes it.
    """
    limits = model.tokenizer.max_lengths
    usual: list[tuple[Role, int]] = [("document", n) for n in LENGTHS if n < limits["document"]]
    roles: tuple[Role, ...] = ("document", "query")
    around = [(role, limits[role] + extra) for extra in (1, 0, -1) for role in roles]
    operations = max(MOST_OPERATIONS, 2.0 * num_parameters(model) * _TOKENS_OF_LARGE)
    tokens = _MOST_TOKENS

    def fits(role: Role, number: int) -> bool:
        read = min(number, limits[role])
        return read <= tokens and _operations(model, read) <= operations

    longest = [one for one in (around[0], *reversed(usual)) if fits(*one)][:1]
    longest = longest or [min(usual[:1] + around[:1], key=lambda one: one[1])]
    chosen: list[ProofText] = []
    left_out: list[str] = []
    for role, number in dict.fromkeys([*longest, *usual, *around]):
        if chosen and not fits(role, number):
            left_out.append(_about(model, role, number))
            continue
        made = text_of_length(model, role, number)
        if made is not None:
            chosen.append(made)
            tokens -= min(number, limits[role])
            operations -= _operations(model, min(number, limits[role]))
    why = f"{', '.join(left_out)}: they would take a CPU minutes, or more than 100 kB"
    return chosen, [why] if left_out else []


def _operations(model: TransformerModel, tokens: int) -> float:
    """Estimate the floating-point operations of a text: products with weights, and attention."""
    products = 2.0 * (num_parameters(model) or _GRAPH) * tokens
    return products * (1 + tokens / (6 * model.dimensions[0]))


def _about(model: TransformerModel, role: Role, number: int) -> str:
    named = {1: "limit + 1", 0: "limit", -1: "limit - 1"}
    shown = named.get(number - model.tokenizer.max_lengths[role], str(number))
    return f"{role} of {shown} tokens"


def text_of_length(model: TransformerModel, role: Role, number: int) -> ProofText | None:
    """Make a text with exactly this number of tokens, prompt and special tokens included; None if
    none is found.
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
            return None
        low, high = (middle, high) if seen[0] < number else (low, middle)
    near = range(max(1, low - _WINDOW // 2), low + _WINDOW)
    for cut, length in zip(near, lengths(near), strict=False):
        if length == number and _story(cut).strip():
            made = text_of(model, _story(cut), role, None, _about(model, role, number))
            return replace(made, tokens=number)
    return None


def _story(characters: int) -> str:
    """Make a text of this number of characters, in which no sentence occurs twice."""
    nouns, places = _NOUNS.split(), _PLACES.split()
    made, size, subject, until = [], 0, 0, _FIRST_SUBJECT
    for number in count(1):
        if size >= until:
            subject, until = subject + 1, 2 * until
        sentence = _SUBJECTS[subject % len(_SUBJECTS)]
        noun, place = nouns[number % len(nouns)], places[number % len(places)]
        made.append(sentence.format(noun=noun, place=place, number=number))
        size += len(made[-1])
        if size >= characters:
            break
    return "".join(made)[:characters]
