"""Reduce the vocabulary to the tokens that occur in texts, with their embeddings."""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PositiveInt

from rayembed.errors import ArtifactError, ConfigError
from rayembed_extras.compression.contract import (
    CalibrationText,
    Compressed,
    Compression,
    CompressionSource,
)
from rayembed_extras.compression.tokenizer_json import (
    check_kind,
    ids_of_processors,
    kept_tokens,
    with_tokens,
)

if TYPE_CHECKING:
    from rayembed.models.transformer_model import TransformerModel

logger = logging.getLogger(__name__)

_OTHER_FILES = ("vocab.txt", "vocab.json", "merges.txt", "added_tokens.json", "*.model")
"""Vocabulary files that may exist next to tokenizer.json, which alone is complete."""


class Vocabulary(Compression):
    """Keep the tokens that occur in texts, such as texts of a few languages, and drop other
    embeddings.

    Texts of kept tokens have the same pieces and the same vectors as before. Special tokens stay,
    and so do single characters or bytes: no text becomes unknown that was not, it has more pieces.
    The texts should be many, and of all languages and subjects that the model is for.
    """

    is_cut: ClassVar[bool] = True

    kind: Literal["vocabulary"] = "vocabulary"
    size: PositiveInt | None = None
    """Maximum number of kept tokens, the most frequent ones; None: all that occur."""
    min_count: PositiveInt = 1
    """Minimum number of occurrences of a kept token."""

    needs_texts: ClassVar[bool] = True

    @property
    def fewest_texts(self) -> int:
        """Minimum number of texts sampled to count tokens; ignored where several sizes are made at
        once, which reads all training texts.
        """
        return 10_000

    @property
    def label(self) -> str:
        """Short name: `vocabulary`, `vocabulary-8000`, `vocabulary-from-3`."""
        size = "" if self.size is None else f"-{self.size}"
        return f"vocabulary{size}" + (f"-from-{self.min_count}" if self.min_count > 1 else "")

    def check(self, folder: Path) -> None:
        """Check that the model's tokenizers are of a kind that can be cut."""
        from rayembed.models.loading.load import empty_model

        for name, pretrained in empty_model(folder).part_tokenizers.items():
            check_kind(_content(pretrained), name)

    def compress(self, source: CompressionSource, output: Path) -> Compressed:
        """Write the model with the smaller vocabulary."""
        import numpy as np

        from rayembed.assets.finite import check_finite_files
        from rayembed.models.architecture import architecture_of
        from rayembed.models.loading.backbones import check_not_quantised
        from rayembed.models.loading.load import load_model, saved_dtype
        from rayembed.models.loading.saved_folder import part_folder
        from rayembed.models.loading.saved_prompts import (
            given_prompts,
            saved_instructions,
            saved_prompts,
        )
        from rayembed.models.passes.encoding import encode
        from rayembed.models.saving.export import check_target, new_folder
        from rayembed_extras.compression.cutting import keep_words
        from rayembed_extras.compression.matrices import statistics_of, statistics_of_cut

        check_target(output)
        if not source.texts:
            raise ConfigError(
                "vocabulary: there are no texts that say which tokens to keep; give texts of all "
                "languages and subjects that the model is for"
            )
        self.check(source.folder)
        model = load_model(source.folder, dtype=saved_dtype(source.folder))
        check_not_quantised(model.parts)
        before = statistics_of(model, ())
        prompts = given_prompts(saved_prompts(source.folder), model.config.prompt("")).values()
        written_texts = [*_as_read(model, source.texts), *prompts]
        whole = self.size is None and self.min_count == 1
        some = [one.text for one in source.texts[:8]]
        expected = encode(model, some, role="document")
        kept = {
            name: _kept(self, model.parts[name], pretrained, written_texts)
            for name, pretrained in model.part_tokenizers.items()
        }
        for name, ids in kept.items():
            if not architecture_of(model.config).cut_vocabulary(model.parts[name], ids):
                keep_words(model.parts[name], ids)
        made = statistics_of_cut(before, model)
        with new_folder(output) as written:
            written.mkdir()
            # Not by `save`: with the whole tokenizer the model embeds nothing.
            instructions = saved_instructions(source.folder, model.config)
            model.write_files(written, instructions=instructions)
            for name, pretrained in model.part_tokenizers.items():
                _write_tokenizer(part_folder(written, name), pretrained, kept[name])
            check_finite_files(written)
            read = load_model(written, dtype=saved_dtype(written))
            read.check_passes(self.label)
            for name, pretrained in model.part_tokenizers.items():
                texts = written_texts if whole else []
                _check_pieces(name, pretrained, read.part_tokenizers[name], texts)
            if whole and not np.array_equal(encode(read, some, role="document"), expected):
                raise ArtifactError(
                    "the model with the smaller vocabulary gives different vectors for texts of "
                    "its kept tokens; the output was removed"
                )
            made.write(self, source.folder, written)
        return made


def _as_read(model: "TransformerModel", texts: Sequence[CalibrationText]) -> list[str]:
    """Yield the texts with the instructions and prefixes that the model puts before them."""
    return [
        model.tokenizer.prompt(model.instruction_of(one.role, one.instruction), one.role) + one.text
        for one in texts
    ]


def _kept(way: Vocabulary, part: Any, pretrained: Any, texts: Sequence[str]) -> list[int]:
    """Choose the token ids to keep for one part of the model, in ascending order."""
    from rayembed.models.tokens import without_settings

    counts: Counter[int] = Counter()
    backend = without_settings(pretrained).backend_tokenizer
    for encoding in backend.encode_batch(list(texts), add_special_tokens=False):
        counts.update(encoding.ids)
    content, rows = _content(pretrained), part.get_input_embeddings().num_embeddings
    always = {*ids_of_processors(content), *pretrained.all_special_ids}
    always |= {number for number in named_ids(part.config).values() if number < rows}
    met = [number for number, count in counts.most_common() if count >= way.min_count]
    ids = kept_tokens(content, met, always, way.size)
    if ids[-1] >= rows:
        raise ConfigError(
            f"vocabulary: the tokenizer does not fit the model: its largest id is {ids[-1]}, but "
            f"the model has {rows} embeddings"
        )
    logger.info(
        "vocabulary: %d of %d tokens are kept; %d tokens occur in the texts",
        len(ids),
        rows,
        len(counts),
    )
    return ids


def named_ids(config: Any) -> dict[str, int]:
    """Find the token ids in a part's configuration, such as `pad_token_id.0`."""
    found: dict[str, int] = {}
    for name, value in vars(config).items():
        if name.endswith("_token_id"):
            numbers = value if isinstance(value, list) else [value]
            found |= {f"{name}.{i}": n for i, n in enumerate(numbers) if isinstance(n, int)}
    return {name: number for name, number in found.items() if number >= 0}


def _content(pretrained: Any) -> dict[str, Any]:
    from rayembed.models.tokens import without_settings

    content: dict[str, Any] = json.loads(without_settings(pretrained).backend_tokenizer.to_str())
    return content


def _write_tokenizer(folder: Path, pretrained: Any, kept: Sequence[int]) -> None:
    """Replace the tokenizer in a folder by a copy with fewer tokens."""
    from rayembed.models.loading.files import read_json, write_json

    content = with_tokens(_content(pretrained), kept)
    text = json.dumps(content, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    for pattern in _OTHER_FILES:
        for path in folder.glob(pattern):
            path.unlink()
    settings = read_json(folder / "tokenizer_config.json")
    new = {old: number for number, old in enumerate(kept)}
    if decoder := settings.get("added_tokens_decoder"):
        settings["added_tokens_decoder"] = {
            str(new[int(old)]): one for old, one in decoder.items() if int(old) in new
        }
    write_json(folder / "tokenizer_config.json", settings)


def _check_pieces(part: str, whole: Any, cut: Any, texts: Sequence[str]) -> None:
    """Check that the smaller tokenizer splits texts as before and has the same special tokens."""
    from rayembed.models.tokens import without_settings

    before, after = (without_settings(one).backend_tokenizer for one in (whole, cut))
    names = [one.special_tokens_map for one in (whole, cut)]
    pieces = [one.encode_batch(list(texts), add_special_tokens=False) for one in (before, after)]
    differ = [
        text for text, old, new in zip(texts, *pieces, strict=True) if old.tokens != new.tokens
    ]
    if differ or not _plain(names[0]).items() <= _plain(names[1]).items():
        what = f"the pieces of {differ[0][:80]!r}" if differ else "special tokens"
        raise ArtifactError(
            f"the smaller vocabulary of the {part} changes {what}; the output was removed"
        )


def _plain(named: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(token) for name, token in named.items()}
