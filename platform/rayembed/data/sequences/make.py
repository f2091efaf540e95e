"""Texts become sequences of tokens: one task a piece of a file, one Parquet part a task.

    storage/data/sequences/<texts>-<fingerprint>/parts/part-<content>.parquet

Which texts share a sequence depends on the files alone, not on the cluster.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import join, write_atomic
from rayembed.config.adaptation import (
    Adaptation,
    CorpusConfig,
    RotaryEncoderConfig,
    TextsConfig,
    TextsSource,
)
from rayembed.data.parts import parquet_bytes
from rayembed.data.prepared import Making, Prepared, Workshop
from rayembed.data.sequences.packing import packed, room_of, truncated
from rayembed.data.sequences.texts import FoundTexts, Piecewise, Refused, Text, read_texts
from rayembed.data.sources.tasks import EXAMPLES_PER_UNIT
from rayembed.data.units import Result, run_units
from rayembed.errors import ConfigError, DataError
from rayembed.models.build import pretrained_tokenizer
from rayembed.models.masked_language_start import transformer_folder
from rayembed.models.masked_language_tokens import Vocabulary, tokens_fingerprint, vocabulary_of
from rayembed.models.tokens import without_settings

log = logging.getLogger(__name__)

CODE_VERSION = 1
"""Raised whenever other sequences come out of the same texts."""

SCHEMA = pa.schema(
    [("hash", pa.int64()), ("language", pa.string()), ("input_ids", pa.list_(pa.int32()))]
)

NO_TOKENS = "no tokens"

_TEXTS_AT_ONCE = 1000
_ROWS_PER_GROUP = 256


@dataclass
class _Language:
    """What a piece holds of one language."""

    texts: list[np.ndarray] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True)
class MakeSequences:
    """Task: the sequences of a piece, by language in the order of the codes, then of the rows."""

    folder: str
    texts: TextsConfig
    content: str
    """Of `FoundTexts`."""
    corpus: CorpusConfig
    model: RotaryEncoderConfig

    def __call__(self, unit: Piecewise) -> Result:
        """`parts` (name, rows), and of each of the `languages` its texts, tokens and sequences."""
        tokenizer, vocabulary = _tokenizer(self.model)
        rejected: Counter[str] = Counter()
        examples: list[dict[str, str]] = []
        by_language: dict[str, _Language] = {}
        used = 0
        usable = _usable(read_texts(self.texts, self.content, unit), rejected, examples)
        while some := list(islice(usable, _TEXTS_AT_ONCE)):
            encodings = tokenizer.encode_batch([t.text for t in some], add_special_tokens=False)
            for text, encoding in zip(some, encodings, strict=True):
                if not encoding.ids:
                    rejected[NO_TOKENS] += 1
                    continue
                used += 1
                language = by_language.setdefault(text.language, _Language())
                language.texts.append(np.array(encoding.ids, dtype=np.int32))
                language.tokens += len(encoding.ids)
        lay_out = packed if self.corpus.layout == "packed" else truncated
        sequences = {
            code: lay_out(one.texts, vocabulary, self.corpus.max_length)
            for code, one in sorted(by_language.items())
        }
        count = sum(map(len, sequences.values()))
        room = room_of(vocabulary, self.corpus.max_length)
        return {
            "rows_in": used + sum(rejected.values()),
            "rows_used": used,
            "rows_out": count,
            "rejected": dict(rejected),
            "examples": examples,
            "parts": [[_write(self.folder, sequences), count]] if count else [],
            "languages": {
                code: {
                    "texts": len(one.texts),
                    "tokens": one.tokens,
                    "tokens_cut": 0
                    if self.corpus.layout == "packed"
                    else sum(max(0, len(text) - room) for text in one.texts),
                    "sequences": len(sequences[code]),
                }
                for code, one in sorted(by_language.items())
            },
        }


def make_sequences(workshop: Workshop, run: Adaptation, found: FoundTexts) -> Prepared:
    """The folder of sequences of a set of texts; `languages` of its manifest has the counts.

    Raises:
        DataError: no usable text, or more bad rows than `source.max_rejected_share`.
        ConfigError: `corpus.max_length` leaves no room for a text.
    """
    folder = transformer_folder(resolve_model(run.model.backbone.path), run.model)
    pretrained = pretrained_tokenizer(folder)
    vocabulary = vocabulary_of(pretrained, str(folder))
    if room_of(vocabulary, run.corpus.max_length) < 1:
        raise ConfigError(
            f"corpus.max_length is {run.corpus.max_length}, but special tokens alone take "
            f"{len(vocabulary.prefix) + len(vocabulary.suffix)}; set it higher"
        )
    texts = found.texts
    making = Making(
        workshop.storage,
        "sequences",
        texts.name,
        {
            "code": CODE_VERSION,
            "settings": texts.model_dump(
                mode="json", exclude={"source": {"path", "max_rejected_share"}}
            ),
            "source": found.content,
            "tokens": tokens_fingerprint(pretrained),
            "layout": run.corpus.layout,
            "max_length": run.corpus.max_length,
        },
    )

    def make() -> Prepared:
        task = MakeSequences(making.parts_folder, texts, found.content, run.corpus, run.model)
        what = f"sequences {texts.name}"
        results = run_units(making.folder, what, task, found.units, workshop.execute)
        parts = [part for result in results for part in result["parts"]]
        return making.finish(results, parts, languages=_languages(results))

    made = making.once(make)
    _accept(found, made.manifest)
    return made


def _usable(
    rows: Iterable[Text | Refused], rejected: Counter[str], examples: list[dict[str, str]]
) -> Iterator[Text]:
    """The texts; of the others reasons are counted and some are shown."""
    for row in rows:
        if isinstance(row, Text):
            yield row
            continue
        rejected[row.reason] += 1
        if len(examples) < EXAMPLES_PER_UNIT:
            examples.append({"reason": row.reason, "row": row.shown})


def _write(folder: str, sequences: Mapping[str, Sequence[np.ndarray]]) -> str:
    """The name of the part that holds the sequences; writing it again changes nothing."""
    rows = [(code, ids) for code, found in sequences.items() for ids in found]
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
    return name


def _hash(language: str, ids: np.ndarray) -> int:
    """Signed 64 bits of a sequence and its language, by which sequences are put in order."""
    digest = xxhash.xxh3_64(language.encode())
    digest.update(ids.tobytes())
    return int(np.uint64(digest.intdigest()).astype(np.int64))


def _languages(results: Iterable[Result]) -> dict[str, dict[str, int]]:
    total: dict[str, Counter[str]] = {}
    for result in results:
        for code, counts in result["languages"].items():
            total.setdefault(code, Counter()).update(counts)
    return {code: dict(counts) for code, counts in sorted(total.items())}


def _accept(found: FoundTexts, told: Mapping[str, Any]) -> None:
    """Return when there are sequences and not too many rows are bad."""
    rows_in, rejected = int(told["rows_in"]), sum(told["rejected"].values())
    reasons = ", ".join(f"{count:,} × {reason}" for reason, count in told["rejected"].items())
    shown = "".join(f"\n  {e['reason']}: {e['row']}" for e in told["examples"][:EXAMPLES_PER_UNIT])
    name, path = found.texts.name, found.texts.source.path
    if not told["rows_out"]:
        raise DataError(
            f"the texts {name!r} are empty: {path!r} has {rows_in} rows, none usable "
            f"({reasons or 'no rows at all'}){shown}"
        )
    source = found.texts.source
    share = source.max_rejected_share if isinstance(source, TextsSource) else 1.0
    if rejected > share * rows_in:
        raise DataError(
            f"the texts {name!r}: {rejected} of {rows_in} rows of {path!r} were rejected "
            f"({reasons}), more than source.max_rejected_share {share}; mend them or raise the "
            f"share. For instance:{shown}"
        )


def _tokenizer(model: RotaryEncoderConfig) -> tuple[Any, Vocabulary]:
    folder = transformer_folder(resolve_model(model.backbone.path), model)
    return _tokenizer_in(str(folder))


@lru_cache(maxsize=2)
def _tokenizer_in(folder: str) -> tuple[Any, Vocabulary]:
    """Of a process, which reads many pieces with it."""
    pretrained = without_settings(pretrained_tokenizer(Path(folder)))
    return pretrained.backend_tokenizer, vocabulary_of(pretrained, folder)
