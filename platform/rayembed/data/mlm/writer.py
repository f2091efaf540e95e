"""Streaming writer of token sequences: writes Parquet parts as they fill, with bounded memory."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import xxhash

from rayembed.assets.arrow_files import parquet_bytes
from rayembed.assets.storage import join, write_atomic
from rayembed.config.adaptation import CorpusConfig
from rayembed.data.mlm.packing import packed, token_budget, truncated, with_special_tokens
from rayembed.data.work_items import Result
from rayembed.models.vocabulary import Vocabulary

SCHEMA = pa.schema(
    [("hash", pa.int64()), ("language", pa.string()), ("input_ids", pa.list_(pa.int32()))]
)

TOKENS_PER_PART = 1 << 24
"""Tokens of pending sequences that trigger a part: 64 MiB, and a few times as much while it is
written. A piece of a splittable file has fewer, so its sequences form one part."""

_ROWS_PER_GROUP = 256


class SequenceWriter:
    """Makes sequences from one task's texts and writes a part whenever enough tokens are pending.

    Part boundaries do not affect sequences. Between calls it holds less than `TOKENS_PER_PART`
    tokens of sequences and less than one sequence of each language.
    """

    def __init__(self, folder: str, corpus: CorpusConfig, vocabulary: Vocabulary) -> None:
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
        """Append texts, (n,) int32 ids each without special tokens, to those of the language."""
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
        """Write the rest; `rows_out`, `parts`, and texts, tokens and sequences of each of
        `languages`.
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
    """Write a part with the sequences, sorted by language code; its name and rows.

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
    """Signed 64-bit hash of a sequence and its language, the sort key of sequences."""
    digest = xxhash.xxh3_64(language.encode())
    digest.update(ids.tobytes())
    return int(np.uint64(digest.intdigest()).astype(np.int64))
