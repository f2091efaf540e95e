"""Reduce a tokenizer.json to fewer tokens, so that texts of kept tokens are tokenised as
before.

WordPiece takes the longest token that fits, Unigram the best sum of scores: neither changes while
the tokens of a text's pieces are there. BPE merges pair after pair by rank: of a kept token all
tokens on the way to it are kept as well, with the merges between kept tokens. Each pair that was
merged is then merged again, in the same order, and no other one appears.
"""

import copy
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rayembed.errors import ConfigError

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")

_KINDS = ("WordPiece", "BPE", "Unigram")


def check_kind(tokenizer: Mapping[str, Any], where: str) -> None:
    """Raise if the tokenizer's type or options do not allow its vocabulary to be reduced.

    Args:
        tokenizer: content of its tokenizer.json.
        where: what to call it in messages.

    Raises:
        ConfigError: it is not.
    """
    model = tokenizer["model"]
    kind = model.get("type")
    if kind not in _KINDS:
        raise ConfigError(
            f"vocabulary: the tokenizer of the {where} is of the kind {kind!r}, and rayembed does "
            f"not know how removing tokens changes its texts; supported kinds: {', '.join(_KINDS)}"
        )
    marks = [model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix")]
    if kind == "BPE" and any(marks):
        raise ConfigError(
            f"vocabulary: the BPE tokenizer of the {where} marks the inside or the end of words "
            f"({marks[0]!r}, {marks[1]!r}); a vocabulary with such marks cannot be reduced"
        )


def kept_tokens(
    tokenizer: Mapping[str, Any], met: Sequence[int], always: Iterable[int], size: int | None
) -> list[int]:
    """Choose the token ids to keep, in ascending order.

    Args:
        tokenizer: content of a tokenizer.json.
        met: ids of texts' tokens, those that are to be kept first standing first.
        always: ids that are kept besides special tokens and characters or bytes.
        size: of the new vocabulary; None: all of `met`.

    Raises:
        ConfigError: what must be kept is more than `size`.
    """
    ids = _ids(tokenizer["model"])
    kept = {one["id"] for one in tokenizer.get("added_tokens", ())} | set(always)
    kept |= {ids[token] for token in _indispensable(tokenizer["model"])}
    if size is not None and len(kept) > size:
        raise ConfigError(
            f"vocabulary.size is {size}, but special tokens and single characters or bytes alone "
            f"are {len(kept)} tokens; set a higher vocabulary.size"
        )
    tokens = {number: token for token, number in ids.items()}
    ways = _Merging(tokenizer["model"]) if tokenizer["model"]["type"] == "BPE" else None
    for number in met:
        needed = {number}
        if ways is not None and number in tokens:
            needed |= {ids[token] for token in ways.way_to(tokens[number]) if token in ids}
        if size is not None and len(kept | needed) > size:
            continue
        kept |= needed
    return sorted(kept)


def with_tokens(tokenizer: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Return the tokenizer.json with the given tokens only, renumbered from 0 in their order."""
    made: dict[str, Any] = copy.deepcopy(dict(tokenizer))
    new = {old: number for number, old in enumerate(kept)}
    model = made["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [entry for old, entry in enumerate(model["vocab"]) if old in new]
        model["unk_id"] = None if model["unk_id"] is None else new[model["unk_id"]]
    else:
        model["vocab"] = {token: new[old] for token, old in model["vocab"].items() if old in new}
    if model["type"] == "BPE":
        words = model["vocab"]
        model["merges"] = [merge for merge in model["merges"] if _is_known(_pair(merge), words)]
    for one in made.get("added_tokens", ()):
        one["id"] = new[one["id"]]
    if made.get("padding"):
        made["padding"]["pad_id"] = new.get(made["padding"]["pad_id"], 0)
    for processor in _processors(made.get("post_processor")):
        for special in (processor.get("special_tokens") or {}).values():
            special["ids"] = [new[old] for old in special["ids"]]
        for name in ("sep", "cls"):
            if name in processor:
                processor[name] = [processor[name][0], new[processor[name][1]]]
    return made


def ids_of_processors(tokenizer: Mapping[str, Any]) -> set[int]:
    """Ids of the special tokens that post-processors add before and after texts."""
    found: set[int] = set()
    for processor in _processors(tokenizer.get("post_processor")):
        for special in (processor.get("special_tokens") or {}).values():
            found |= set(special["ids"])
        found |= {processor[name][1] for name in ("sep", "cls") if name in processor}
    return found


class _Merging:
    """The merge rules of a BPE tokenizer, by rank."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        self._ranks = {_pair(merge): rank for rank, merge in enumerate(model["merges"])}

    def way_to(self, token: str) -> set[str]:
        """Return the token and the intermediate tokens that BPE merges on the way to it."""
        parts, seen = list(token), set(token)
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            place = pairs.index(best)
            parts[place : place + 2] = ["".join(best)]
            seen.add(parts[place])
        return seen


def _ids(model: Mapping[str, Any]) -> dict[str, int]:
    if model["type"] == "Unigram":
        return {token: number for number, (token, _) in enumerate(model["vocab"])}
    found: dict[str, int] = model["vocab"]
    return found


def _indispensable(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield tokens that must be kept because removing them would change how texts and unknown
    characters are tokenised.
    """
    words = _ids(model)
    if (unknown := model.get("unk_token")) in words:
        yield unknown
    if model.get("unk_id") is not None:
        yield model["vocab"][model["unk_id"]][0]
    if model["type"] == "Unigram":  # an unknown character weighs less than the least of them
        yield min(model["vocab"], key=lambda entry: entry[1])[0]
    if model.get("byte_fallback"):
        yield from (token for token in words if _BYTE.fullmatch(token))
        yield from (token for token in ("▁",) if token in words)
        return
    prefix = model.get("continuing_subword_prefix") or ""
    yield from (token for token in words if len(token) == 1)
    if prefix:
        yield from (t for t in words if t.startswith(prefix) and len(t) == len(prefix) + 1)


def _is_known(pair: tuple[str, str], words: Mapping[str, int]) -> bool:
    return all(token in words for token in (*pair, "".join(pair)))


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _processors(processor: Any) -> Iterator[dict[str, Any]]:
    """Yield a post-processor and all processors nested in it."""
    if processor:
        yield processor
        for one in processor.get("processors", ()):
            yield from _processors(one)
