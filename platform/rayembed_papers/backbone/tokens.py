"""Tokenise inputs into compact arrays, and pad them to batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rayembed.errors import ArtifactError
from rayembed.models.loading.files import read_json
from rayembed.models.tokens import padded
from rayembed_papers.backbone.heads import family_of

Feature = dict[str, Any]
"""An input: `input_ids` and, if the encoder has several types, `token_type_ids`, as numpy arrays of
(T,), with labels."""

_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.model",
)
"""Files of a tokenizer; at least one must exist."""

_SPLIT_WORDS_NEED_SPACE = ("roberta", "gpt2", "bloom")
"""Families whose tokenizers need an option to accept separate words: a space before each."""


class BackboneTokenizer:
    """The tokenizer of a folder, with a maximum length."""

    def __init__(self, folder: Path, max_length: int) -> None:
        """Load the tokenizer."""
        import transformers

        settings = read_json(folder / "config.json")
        if not any((folder / name).is_file() for name in _FILES):
            # transformers would make an empty one without a word
            raise ArtifactError(
                f"no tokenizer in {str(folder)!r}, which has none of the files {', '.join(_FILES)}"
            )
        more = {}
        if settings.get("model_type") in _SPLIT_WORDS_NEED_SPACE:
            more["add_prefix_space"] = True
        try:
            found: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=False, **more
            )
        except (OSError, ValueError, KeyError) as error:
            raise ArtifactError(f"no tokenizer in {str(folder)!r}: {error}") from error
        if not found.is_fast or found.pad_token_id is None:
            raise ArtifactError(
                f"the tokenizer in {str(folder)!r} must be a fast tokenizer (tokenizer.json) with "
                f"a padding token, but it is a {type(found).__name__} with the padding token "
                f"{found.pad_token!r}"
            )
        self.max_length = max_length
        self.pretrained = found
        has_types = settings.get("type_vocab_size", 0) > 1 and family_of(folder) != "nomic"
        self._names = ("input_ids", "token_type_ids") if has_types else ("input_ids",)

    def texts(
        self, first: Sequence[str], second: Sequence[str] | None = None, length: int | None = None
    ) -> list[Feature]:
        """Tokenise texts or pairs of texts; the longer text of a pair is cut first."""
        encoded = self.encode(first, second, truncation=True, max_length=length)
        return self.features(encoded)

    def encode(self, first: Any, second: Any = None, **options: Any) -> Any:
        """Call transformers' tokenizer, with all of its options."""
        length = options.pop("max_length", None) or self.max_length
        types = {"return_token_type_ids": len(self._names) > 1, "return_attention_mask": False}
        return self.pretrained(first, second, max_length=length, **types, **options)

    def features(self, encoded: Any) -> list[Feature]:
        """Convert an encoding of `encode` to one input for each row."""
        columns = [encoded[name] for name in self._names]
        return [
            {n: np.asarray(v, dtype=np.int32) for n, v in zip(self._names, values, strict=True)}
            for values in zip(*columns, strict=True)
        ]

    def padded(self, features: Sequence[Feature]) -> dict[str, Tensor]:
        """Pad inputs to tensors (B, longest) with their `attention_mask`."""
        rows = [feature["input_ids"] for feature in features]
        ids, mask = padded(rows, self.pretrained.pad_token_id)
        batch = {"input_ids": ids, "attention_mask": mask}
        if "token_type_ids" in self._names:
            batch["token_type_ids"] = self.padded_values(features, "token_type_ids", 0)
        return batch

    def padded_values(self, features: Sequence[Feature], name: str, value: int) -> Tensor:
        """Pad one value for each token to an int64 tensor (B, longest)."""
        return padded([feature[name] for feature in features], value)[0]
