"""Reproduce usual mistakes of embedding servers on a loaded model, to store their vectors in its
proof.

Each is made by the model's own tokenizer and modules. What an architecture cannot be served with is
left out, as is what changes no vector.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from rayembed.config.types import Role
from rayembed.models.contract import Tokens, cost
from rayembed.models.transformer_model import TransformerModel
from rayembed.proof.check import cosines
from rayembed.proof.proof import Mistake, ProofText
from rayembed.proof.texts import FOR_MISTAKES, is_large, tokens_of
from rayembed.proof.write import TOLERANCE, MistakeMaker
from rayembed_extras.verification import wrong_passes
from rayembed_extras.verification.advice import length_advice
from rayembed_extras.verification.long_texts import long_texts

NUMBER, NUMBER_OF_LARGE = 8, 4
"""Texts of a mistake, and those of a large model, for one in each role and an instruction."""

_SHORT, _LONG = 32, 320
"""Tokens of the texts that are rounded: short ones, and the longest of the others."""
_CUT = 3
"""Texts of a cut, the shortest that it changes: each costs as much as all short ones."""
_CUTS = (128, 256, 512)
"""Lengths at which servers cut texts unless they are told the model's."""
_OTHER: dict[Role, Role] = {"query": "document", "document": "query"}
_POOLINGS = {"mean": "mean pooling", "cls": "CLS pooling", "last": "last-token pooling"}


class ProvedModel:
    """A loaded model with the texts of its proof and their reference vectors."""

    def __init__(
        self, model: TransformerModel, texts: Sequence[ProofText], right: np.ndarray
    ) -> None:
        self.model, self.texts, self.right = model, texts, right
        self.tokenizer: Any = model.tokenizer
        self.number = NUMBER_OF_LARGE if is_large(model) else NUMBER

    @cached_property
    def short(self) -> tuple[int, ...]:
        """Indices of the short texts used for most mistakes; texts with their own instruction come
        first.
        """
        told = [i for i, text in enumerate(self.texts) if text.instruction is not None]
        short = [
            i for about in FOR_MISTAKES for i, text in enumerate(self.texts) if text.about == about
        ]
        return tuple([*told[: self.number // 4], *short][: self.number])

    @cached_property
    def tokens(self) -> list[Tokens]:
        """Tokens of the `short` texts."""
        return self.tokens_of(self.short)

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each text of the proof, as the model reads it."""
        return [cost(one) for one in self.tokens_of(range(len(self.texts)))]

    @cached_property
    def distinct(self) -> list[int]:
        """Indices of distinct texts; a text in both roles counts once."""
        return list({text.text: place for place, text in enumerate(self.texts)}.values())

    def tokens_of(self, places: Iterable[int]) -> list[Tokens]:
        """Tokenise the texts at the given indices as the model reads them."""
        return tokens_of(self.model, [self.texts[i] for i in places])

    def where(self, differs: Callable[[ProofText], bool]) -> tuple[int, ...]:
        """Return indices of some texts that satisfy a condition, short texts first."""
        order = dict.fromkeys([*self.short, *range(len(self.texts))])
        return tuple([i for i in order if differs(self.texts[i])][: self.number])

    def changed(self, change: Callable[[ProofText], ProofText]) -> "tuple[tuple[int, ...], Any]":
        """Return indices of the first texts that a change alters, with the altered texts' vectors
        (None if it alters none).
        """
        places = self.where(lambda text: change(text) != text)
        read = tokens_of(self.model, [change(self.texts[i]) for i in places])
        return places, wrong_passes.embed(self.model, read) if read else None


Made = Iterator[Mistake]


def usual_mistakes(
    model: TransformerModel, texts: Sequence[ProofText], right: np.ndarray
) -> list[Mistake]:
    """Compute the vectors of each usual mistake that can occur when the model is served.

    Args:
        texts: those of the proof.
        right: (N, D) their right vectors.
    """
    served = ProvedModel(model, texts, right)
    made: list[Mistake] = []
    for mistake in (one for make in _MAKERS for one in make(served)):
        same = (other for other in made if other.texts == mistake.texts)
        if not any(_equal(mistake.vectors, other.vectors) for other in same):
            made.append(mistake)
    return [*made, *_rounding(served)]


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two mistakes give the same vectors, such as two names of one pooling."""
    if one.shape != other.shape:
        return False
    near, lengths = cosines(one, other)
    return bool(near.min() >= TOLERANCE["float32"]) and np.allclose(
        lengths, np.linalg.norm(other, axis=1), rtol=0.01
    )


def _prompts(served: ProvedModel) -> Made:
    tokenizer, model = served.tokenizer, served.model

    def wrong_role(text: ProofText) -> ProofText:
        role = _OTHER[text.role]
        prompt = tokenizer.prompt(model.instruction_of(role, None), role)
        return replace(text, role=role, prompt=prompt) if prompt != text.prompt else text

    places, vectors = served.changed(lambda text: replace(text, prompt=""))
    if vectors is not None:
        yield Mistake(
            "no_prompt",
            "no prompt before the texts",
            "put each text's prompt before it (config_sentence_transformers.json and proof.json "
            "have them); most servers add none by themselves",
            places,
            vectors,
        )
    places, vectors = served.changed(wrong_role)
    if vectors is not None:
        yield Mistake(
            "wrong_role",
            "the prompts of queries and documents exchanged",
            "send queries with the prompt of queries and documents with that of documents "
            "(input_type, prompt_name or role of the request)",
            places,
            vectors,
        )
    places, vectors = served.changed(_lower)
    if vectors is not None:
        yield Mistake(
            "lower_cased",
            "texts turned to lower case",
            "turn lower-casing off (do_lower_case in the tokenizer's settings)",
            places,
            vectors,
        )


def _lower(text: ProofText) -> ProofText:
    return replace(text, text=text.text.lower(), prompt=text.prompt.lower())


def _pooling(served: ProvedModel) -> Made:
    if not served.short:
        return
    found = wrong_passes.poolings(served.model, served.tokens)
    if not found:
        return
    right = served.right[list(served.short)]
    least = TOLERANCE["float32"]
    own = [name for name, made in found.items() if cosines(made, right)[0].min() >= least]
    named = _POOLINGS.get(own[0] if own else "", "a pooling of its own")
    where = "mean pooling without the prompt" if own == ["pool"] else named
    for name, words in _POOLINGS.items():
        if name in own:
            continue
        what, advice = f"{words} where the model has {where}", f"set the server's pooling: {where}"
        if own == ["pool"] and name == "mean":
            what = "the prompt's tokens pooled, which the model leaves out"
            advice = "take the tokens of the prompt out of the pooling (include_prompt=false)"
        yield Mistake(
            f"{name if name != 'last' else 'last_token'}_pooling",
            what,
            advice,
            served.short,
            found[name],
        )
    if not own and getattr(served.model, "pooling", None) is not None:
        yield Mistake(
            "no_head",
            "mean pooling without the trained layer that pools",
            "serve the model with its own pooling layer (pooling.safetensors); servers that know "
            "plain poolings alone cannot serve it",
            served.short,
            found["pool"],
        )


def _modules(served: ProvedModel) -> Made:
    model, tokens = served.model, served.tokens
    if not tokens:
        return
    tried = [
        (
            "no_dense",
            "the Dense layers behind the pooling left out",
            "serve the modules behind the pooling too (2_Dense in modules.json)",
            wrong_passes.without_projections(model, tokens),
        ),
        (
            "causal_mask",
            "the causal mask left on, which the model was trained without",
            "turn the decoder's causal mask off (is_causal=false), or take a server that knows "
            "this architecture",
            wrong_passes.with_causal_mask(model, tokens),
        ),
        (
            "no_normalisation",
            "vectors that are not of length 1",
            "turn normalisation on, or divide each vector by its length; cosines are right, dot "
            "products are not",
            wrong_passes.unnormalised(model, tokens),
        ),
        (
            "no_corpus",
            "the corpus of the folder left out",
            "load corpus.safetensors of the folder as the model's context",
            _without_corpus(model, tokens),
        ),
    ]
    for name, what, advice, vectors in tried:
        if vectors is not None:
            yield Mistake(name, what, advice, served.short, vectors)


def _without_corpus(model: Any, tokens: Sequence[Tokens]) -> np.ndarray | None:
    if not model.uses_context or getattr(model, "corpus", None) is None:
        return None
    made: np.ndarray = wrong_passes.embed(model, tokens, model.no_context())
    return made


def _specials(served: ProvedModel) -> Made:
    """Yield mistakes of special tokens: the last token missing, the first one twice."""
    if not served.tokens:
        return
    pretrained = served.tokenizer.pretrained
    special = set(pretrained.all_special_ids)
    ids = [one["input_ids"] for one in served.tokens]
    if all(len(one) > 2 and int(one[-1]) in special for one in ids):
        end = pretrained.convert_ids_to_tokens(int(ids[0][-1]))
        yield Mistake(
            "no_eos",
            f"the end token {end} missing behind the texts",
            f"add {end} behind each text (add_special_tokens, add_eos_token)",
            served.short,
            wrong_passes.embed(served.model, [_without_last(one) for one in served.tokens]),
        )
    yield from _added_end(served, ids, special)
    first = {int(one[0]) for one in ids}
    begin = first.pop() if len(first) == 1 else -1
    twice = begin in special and all(int(one[1]) != begin for one in ids)
    begin = begin if twice else pretrained.bos_token_id
    if begin is not None:
        name = pretrained.convert_ids_to_tokens(begin)
        read = [_with_first(one, begin) for one in served.tokens]
        what = f"the first token {name} added, which the model does not read"
        advice = f"turn add_bos_token off, so that no {name} stands before a text"
        if twice:
            what = f"the first token {name} twice"
            advice = (
                f"send texts without {name}, or turn add_special_tokens (add_bos_token) off: one "
                "of tokenizer and template adds it already"
            )
        yield Mistake(
            "double_bos",
            what,
            advice,
            served.short,
            wrong_passes.embed(served.model, read),
        )
    if twice and all(len(one) > 2 for one in ids):
        yield Mistake(
            "no_bos",
            f"the first token {name} missing before the texts",
            f"add {name} before each text (add_special_tokens, add_bos_token)",
            served.short,
            wrong_passes.embed(served.model, [_without_first(one) for one in served.tokens]),
        )


def _added_end(served: ProvedModel, ids: Sequence[np.ndarray], special: set[int]) -> Made:
    """The last token twice, or added where the model reads none."""
    pretrained = served.tokenizer.pretrained
    last = {int(one[-1]) for one in ids}
    end = last.pop() if len(last) == 1 else -1
    twice = end in special and all(int(one[-2]) != end for one in ids)
    end = end if twice else pretrained.eos_token_id
    if end is None:
        return
    name = pretrained.convert_ids_to_tokens(end)
    what = f"the end token {name} " + ("twice" if twice else "added, which the model does not read")
    yield Mistake(
        "double_eos",
        what,
        f"turn add_eos_token off, or send texts without {name}",
        served.short,
        wrong_passes.embed(served.model, [_with_last(one, end) for one in served.tokens]),
    )


def _without_last(tokens: Tokens) -> Tokens:
    return {key: value if _is_of_encoder(key) else value[:-1] for key, value in tokens.items()}


def _without_first(tokens: Tokens) -> Tokens:
    return {key: value if _is_of_encoder(key) else value[1:] for key, value in tokens.items()}


def _with_last(tokens: Tokens, last: int) -> Tokens:
    """Tokens with one more behind them, pooled as the last one is."""
    made = {}
    for key, value in tokens.items():
        new = np.array([last], value.dtype) if key == "input_ids" else value[-1:]
        made[key] = value if _is_of_encoder(key) else np.concatenate([value, new])
    return made


def _with_first(tokens: Tokens, first: int) -> Tokens:
    """Insert one more token at the beginning, which is pooled if the previous first token is."""
    made = {}
    for key, value in tokens.items():
        new = value[:1] if key == "pool_mask" else np.zeros(1, value.dtype)
        new = np.array([first], value.dtype) if key == "input_ids" else new
        made[key] = value if _is_of_encoder(key) else np.concatenate([new, value])
    return made


def _is_of_encoder(key: str) -> bool:
    return key.startswith("encoder_")


def _lengths(served: ProvedModel) -> Made:
    """Yield mistakes that cut texts before the model's length; none of large models, for which they
    would cost as much as all others (`cuts` measures them).
    """
    if served.number < NUMBER:
        return
    tokenizer = served.tokenizer
    for number in _CUTS:
        longer = [i for i in served.distinct if served.lengths[i] > number]
        places = sorted(longer, key=lambda place: served.lengths[place])[:_CUT]
        if not places:
            continue
        shorter: Any = copy.copy(served.model.tokenizer)
        shorter.max_lengths = {
            role: min(number, length) for role, length in tokenizer.max_lengths.items()
        }
        texts = [served.texts[i] for i in places]
        read = [shorter.with_prompts([t.text], [t.prompt], t.role)[0] for t in texts]
        yield Mistake(
            f"cut_at_{number}",
            f"texts cut at {number} tokens",
            length_advice(max(tokenizer.max_lengths.values())),
            tuple(places),
            wrong_passes.embed(served.model, read),
        )


def _widths(served: ProvedModel) -> Made:
    """Yield the mistakes of a server that cuts vectors to fewer dimensions and normalises them."""
    full, *offered = served.model.dimensions
    for width in offered[:2] or [full // 2]:
        part = served.right[list(served.short), :width]
        yield Mistake(
            f"cut_to_{width}",
            f"vectors cut to {width} numbers where the model has {full}",
            f"ask for {full} numbers (dimensions, truncate_dim)",
            served.short,
            part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12),
        )


def _rounding(served: ProvedModel) -> Made:
    """Yield vectors rounded to fewer bits, from which the allowed differences are derived; they are
    no mistakes.

    Kept are the texts that it moves furthest, since these set the tolerances.
    """
    if not (served.tokens and served.model.parts and served.model.number_type == "float32"):
        return
    order = sorted(served.distinct, key=lambda place: served.lengths[place])
    # Apart, so that short texts are not padded to the long one.
    parts = [
        [place for place in order if served.lengths[place] <= _SHORT],
        [place for place in order if _SHORT < served.lengths[place] <= _LONG][-1:],
    ]
    if served.number < NUMBER:
        parts = [list(served.short)]
    places = np.concatenate(parts).astype(int)
    advice = "use the number type of the folder's weights, or accept it as a rounding"
    for name, embed in (("bfloat16", wrong_passes.in_bfloat16), ("int8", wrong_passes.in_int8)):
        made = np.concatenate(
            [embed(served.model, served.tokens_of(part)) for part in parts if part]
        )
        furthest = np.argsort(cosines(made, served.right[places])[0])[:NUMBER]
        texts = tuple(places[furthest].tolist())
        yield Mistake(name, f"{name} where float32 is meant", advice, texts, made[furthest])


_MAKERS = (_prompts, _pooling, _modules, _specials, _lengths, _widths)

USUAL = MistakeMaker(usual_mistakes, long_texts)
"""The usual mistakes, for the proofs of all models, with texts that cuts change."""
