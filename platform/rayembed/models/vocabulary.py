"""Tokenizer facts for packing, masking and embedding. Independent of torch."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from rayembed.errors import ArtifactError
from rayembed.models.tokens import TextTokenizer, special_layout, without_settings


@dataclass(frozen=True)
class Vocabulary:
    """Ids of a tokenizer's special tokens, and the number of words."""

    prefix: tuple[int, ...]
    """Special tokens before a sequence."""
    suffix: tuple[int, ...]
    """Special tokens after a sequence, and between texts within one."""
    mask_id: int
    pad_id: int
    special_ids: tuple[int, ...]
    """Ids that are never masked."""
    num_words: int
    """Vocabulary size for drawing random words."""


def vocabulary_of(pretrained: Any, where: str) -> Vocabulary:
    """Vocabulary of a tokenizer of transformers.

    Args:
        where: what to call it in messages.

    Raises:
        ArtifactError: it has no mask, or makes no tokens.
    """
    if pretrained.mask_token_id is None:
        raise ArtifactError(
            f"the tokenizer in {where!r} has no mask token, which masked-language modelling puts "
            "in place of words; take a model that was trained so, or name its mask_token in "
            "tokenizer_config.json"
        )
    prefix, suffix = special_layout(without_settings(pretrained).backend_tokenizer)
    return Vocabulary(
        prefix=tuple(prefix),
        suffix=tuple(suffix),
        mask_id=int(pretrained.mask_token_id),
        pad_id=int(pretrained.pad_token_id or 0),
        special_ids=tuple(sorted(map(int, pretrained.all_special_ids))),
        num_words=len(pretrained),
    )


def check_vocabulary(pretrained: Any, words: int, where: str) -> frozenset[int]:
    """Ids of placeholders for images and the like, in texts alone, that have no embedding.

    Such ids fail a pass: Gemma 3's text models have tokenizers with one for images.

    Args:
        words: number of the model's embeddings.
        where: what to call the model in messages.

    Raises:
        ArtifactError: other tokens have no embedding.
    """
    added = pretrained.added_tokens_decoder
    largest = max(
        [pretrained.backend_tokenizer.get_vocab_size(with_added_tokens=False) - 1, *added]
    )
    if largest < words:
        return frozenset()
    kinds = ("image", "audio", "video")
    placeholders = {
        number
        for number, token in added.items()
        if token.special and any(kind in token.content for kind in kinds)
    }
    missing = [i for i in range(words, largest + 1) if i not in placeholders]
    if missing:
        shown = [pretrained.convert_ids_to_tokens(i) for i in missing[:3]]
        raise ArtifactError(
            f"the tokenizer of {where} has {len(missing)} tokens behind the model's {words} "
            f"embeddings, such as {shown}; resize the model's embeddings "
            "(resize_token_embeddings in transformers), or take the tokenizer that it was "
            "trained with"
        )
    return frozenset(range(words, largest + 1))


def check_words(model: Any) -> None:
    """Check that each part of a model has an embedding for each token of its tokenizer.

    Args:
        model: a `transformer_model.TransformerModel`.

    Raises:
        ArtifactError: a token has none.
    """
    for name, part in model.parts.items():
        words = part.get_input_embeddings().num_embeddings
        pretrained = model.part_tokenizers[name]
        missing = check_vocabulary(pretrained, words, f"the {name}")
        if isinstance(model.tokenizer, TextTokenizer) and pretrained is model.tokenizer.pretrained:
            model.tokenizer.without_embedding = missing


def tokens_fingerprint(pretrained: Any) -> str:
    """Fingerprint of everything that decides a text's tokens; twelve hexadecimal digits."""
    told = [without_settings(pretrained).backend_tokenizer.to_str(), *pretrained.all_special_ids]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]
