"""Cut texts into sequences of bounded length and write them as Parquet files, with bounded
memory.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import xxhash

from rayembed.assets.arrow_files import parquet_bytes
from rayembed.assets.storage import join, write_atomic
from rayembed.data.engine.work_items import Result
from rayembed_extras.adaptation.settings import CorpusConfig
from rayembed_extras.adaptation.vocabulary import MaskingVocabulary

SCHEMA = pa.schema(
    [("hash", pa.int64()), ("language", pa.string()), ("input_ids", pa.list_(pa.int32()))]
)

TOKENS_PER_PART = 1 << 24
"""Tokens of pending sequences that trigger a part: 64 MiB, and a few times as much while it is
written. A piece of a splittable file has fewer, so its sequences form one part."""

_ROWS_PER_GROUP = 256


class SequenceWriter:
    """Make sequences from one task's texts; write a Parquet file whenever enough tokens are
    collected.

    Part boundaries do not affect sequences. Between calls it holds less than `TOKENS_PER_PART`
    tokens of sequences and less than one sequence of each language.
    """

    def __init__(self, folder: str, corpus: CorpusConfig, vocabulary: MaskingVocabulary) -> None:
        self.folder, self.corpus, self.vocabulary = folder, corpus, vocabulary
        self.waiting: dict[str, list[np.ndarray]] = {}
        """Pending sequences of each language."""
        self.rest: dict[str, np.ndarray] = {}
        """Tokens of each language after its last full sequence."""
        self.parts: list[tuple[str, int]] = []
        """Name and number of sequences of each part."""
        self.languages: dict[str, Counter[str]] = {}
        self._tokens = 0

    def take(self, language: str, texts: Sequence[np.ndarray]) -> None:
        """Add texts of a language, each as (n,) int32 token ids without special tokens."""
        counts = self.languages.setdefault(language, Counter())
        counts["texts"] += len(texts)
        counts["tokens"] += sum(map(len, texts))
        length = self.corpus.max_length
        if self.corpus.layout == "packed":
            made, rest = packed(texts, self.vocabulary, length, self.rest.get(language))
            if rest is not None:
                self.rest[language] = rest
        else:
            made = truncated(texts, self.vocabulary, length)
            room = token_budget(self.vocabulary, length)
            counts["tokens_cut"] += sum(max(0, len(text) - room) for text in texts)
        self._keep(language, made)

    def finish(self) -> Result:
        """Write the pending sequences; return `rows_out`, `parts`, and for each of `languages` the
        texts, tokens and sequences.
        """
        for language, rest in self.rest.items():
            self._keep(language, [with_special_tokens(rest, self.vocabulary)] if len(rest) else [])
        self.rest = {}
        self._flush()
        names = ("texts", "tokens", "tokens_cut", "sequences")
        return {
            "rows_out": sum(rows for _, rows in self.parts),
            "parts": [list(part) for part in self.parts],
            "languages": {
                code: {name: counts[name] for name in names}
                for code, counts in sorted(self.languages.items())
            },
        }

    def _keep(self, language: str, sequences: Sequence[np.ndarray]) -> None:
        for ids in sequences:
            self.waiting.setdefault(language, []).append(ids)
            self.languages[language]["sequences"] += 1
            self._tokens += len(ids)
            if self._tokens >= TOKENS_PER_PART:
                self._flush()

    def _flush(self) -> None:
        if self.waiting:
            self.parts.append(_write(self.folder, self.waiting))
        self.waiting, self._tokens = {}, 0


def _write(folder: str, sequences: Mapping[str, Sequence[np.ndarray]]) -> tuple[str, int]:
    """Write sequences, sorted by language code, to a Parquet file; return its name and number of
    rows.

    Idempotent.
    """
    rows = [(code, ids) for code, found in sorted(sequences.items()) for ids in found]
    table = pa.table(
        [
            pa.array([_hash(code, ids) for code, ids in rows], pa.int64()),
            pa.array([code for code, _ in rows], pa.string()),
            pa.array([ids for _, ids in rows], pa.list_(pa.int32())),
        ],
        schema=SCHEMA,
    )
    content = parquet_bytes(table, _ROWS_PER_GROUP)
    name = f"part-{xxhash.xxh3_128_hexdigest(content)}.parquet"
    write_atomic(join(folder, name), content)
    return name, len(rows)


def _hash(language: str, ids: np.ndarray) -> int:
    """Signed 64-bit hash of a sequence and its language, by which sequences are sorted."""
    digest = xxhash.xxh3_64(language.encode())
    digest.update(ids.tobytes())
    return int(np.uint64(digest.intdigest()).astype(np.int64))


def packed(
    texts: Sequence[np.ndarray],
    vocabulary: MaskingVocabulary,
    length: int,
    before: np.ndarray | None = None,
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Concatenate texts and cut them into full sequences; return these and the remaining
    tokens.

    Texts are separated by the tokenizer's closing special tokens, and each sequence is enclosed in
    its special tokens. The remainder, (r,) int32 without special tokens and shorter than a
    sequence, is passed to the next call; after the last text it forms a shorter sequence.

    Args:
        texts: (n,) int32 ids of each text, without special tokens.
        length: tokens of a sequence, special ones included.
        before: what the call before left; None: no text came before these.
    """
    if not texts:
        return [], before
    between = np.array(vocabulary.suffix, dtype=np.int32)
    parts = [part for text in texts for part in (between, text)]
    stream = np.concatenate(parts[1:] if before is None else [before, *parts])
    room = token_budget(vocabulary, length)
    full = len(stream) - len(stream) % room
    found = [with_special_tokens(stream[a : a + room], vocabulary) for a in range(0, full, room)]
    return found, stream[full:].copy()  # a view would keep the whole stream


def truncated(
    texts: Sequence[np.ndarray], vocabulary: MaskingVocabulary, length: int
) -> list[np.ndarray]:
    """Make one sequence of each text, cut at its end if too long; arguments as in `packed`."""
    room = token_budget(vocabulary, length)
    return [with_special_tokens(text[:room], vocabulary) for text in texts]


def with_special_tokens(ids: np.ndarray, vocabulary: MaskingVocabulary) -> np.ndarray:
    """(T,) int32 token ids enclosed in the tokenizer's special tokens."""
    return np.concatenate([vocabulary.prefix, ids, vocabulary.suffix]).astype(np.int32)


def token_budget(vocabulary: MaskingVocabulary, length: int) -> int:
    """Maximum number of text tokens in a sequence, without special tokens."""
    return length - len(vocabulary.prefix) - len(vocabulary.suffix)
