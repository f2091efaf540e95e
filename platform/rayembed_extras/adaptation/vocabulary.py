"""Properties of a tokenizer that packing and masking need: special tokens and number of words.
Independent of torch.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from rayembed.errors import ArtifactError
from rayembed.models.tokens import special_layout, without_settings


@dataclass(frozen=True)
class MaskingVocabulary:
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


def vocabulary_of(pretrained: Any, where: str) -> MaskingVocabulary:
    """Read the vocabulary of a transformers tokenizer.

    Args:
        where: what to call it in messages.

    Raises:
        ArtifactError: it has no mask, or makes no tokens.
    """
    if pretrained.mask_token_id is None:
        raise ArtifactError(
            f"the tokenizer in {where!r} has no mask token, which masked-language modelling puts "
            "in place of words; use a model that was trained with masked-language modelling, or "
            "name its mask_token in tokenizer_config.json"
        )
    prefix, suffix = special_layout(without_settings(pretrained).backend_tokenizer)
    return MaskingVocabulary(
        prefix=tuple(prefix),
        suffix=tuple(suffix),
        mask_id=int(pretrained.mask_token_id),
        pad_id=int(pretrained.pad_token_id or 0),
        special_ids=tuple(sorted(map(int, pretrained.all_special_ids))),
        num_words=len(pretrained),
    )


def tokens_fingerprint(pretrained: Any) -> str:
    """Fingerprint, twelve hexadecimal digits, of all tokenizer settings that affect a text's
    tokens.
    """
    content = [without_settings(pretrained).backend_tokenizer.to_str(), *pretrained.all_special_ids]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
