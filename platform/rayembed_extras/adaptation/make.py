"""Cut texts into token sequences and assign them to training steps. Independent of Ray.

One task for each piece of a file writes one or more parts:

    storage/data/sequences/<texts>-<fingerprint>/parts/part-<content>.parquet

Which texts share a sequence depends on the files alone, not on the cluster.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rayembed.assets.resolver import resolve_model
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact, PipelineContext
from rayembed.data.engine.work_items import Result, run_resumable
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.tasks import EXAMPLES_PER_ITEM, counts_of
from rayembed.errors import ConfigError, DataError
from rayembed.models.loading.start import part_within
from rayembed.models.tokens import pretrained_tokenizer, without_settings
from rayembed_extras.adaptation.plan import write_sequence_plan
from rayembed_extras.adaptation.settings import (
    Adaptation,
    CorpusConfig,
    RotaryEncoderConfig,
    TextsConfig,
)
from rayembed_extras.adaptation.texts import FoundTexts, RejectedRow, Text, find_texts, read_texts
from rayembed_extras.adaptation.vocabulary import (
    MaskingVocabulary,
    tokens_fingerprint,
    vocabulary_of,
)
from rayembed_extras.adaptation.writer import SequenceWriter, token_budget

log = logging.getLogger(__name__)

CODE_VERSION = 1
"""Code version; raise it when the same texts yield other sequences or parts."""

NO_TOKENS = "no tokens"

_TEXTS_AT_ONCE = 1000
_CHARACTERS_AT_ONCE = 1 << 21
"""Characters tokenised in one call; a tokenizer needs about 100 bytes for each token of a call."""


@dataclass(frozen=True)
class MakeSequences:
    """Task that turns the texts of one work item into sequences, in row order within each
    language.

    A piece may have any size (for instance a compressed file): pending tokens are limited to one
    part. Only single texts are held whole.
    """

    folder: str
    texts: TextsConfig
    corpus: CorpusConfig
    model: RotaryEncoderConfig

    def __call__(self, item: FilePiece) -> Result:
        """Run the task; its result has `parts` (name, rows), and counts of texts, tokens and
        sequences for each of `languages`.
        """
        folder = part_within(resolve_model(self.model.backbone.path), "backbone")
        tokenizer, vocabulary = _tokenizer_in(str(folder))
        rejected: Counter[str] = Counter()
        examples: list[dict[str, str]] = []
        writer = SequenceWriter(self.folder, self.corpus, vocabulary)
        used = 0
        usable = _usable(read_texts(self.texts, item), rejected, examples)
        for some in _at_once(usable):
            encodings = tokenizer.encode_batch([t.text for t in some], add_special_tokens=False)
            by_language: dict[str, list[np.ndarray]] = {}
            for text, encoding in zip(some, encodings, strict=True):
                if not encoding.ids:
                    rejected[NO_TOKENS] += 1
                    continue
                used += 1
                ids = np.array(encoding.ids, dtype=np.int32)
                by_language.setdefault(text.language, []).append(ids)
            for language, texts in by_language.items():
                writer.take(language, texts)
        return {
            "rows_in": used + sum(rejected.values()),
            "rows_used": used,
            "rejected": dict(rejected),
            "examples": examples,
            **writer.finish(),
        }


def make_sequences(context: PipelineContext, run: Adaptation, found: FoundTexts) -> DatasetArtifact:
    """Make the sequences of a set of texts, or reuse them; the manifest records the counts by
    language.

    Raises:
        DataError: no usable text, or more bad rows than `source.max_rejected_share`.
        ConfigError: `corpus.max_length` leaves no room for a text.
    """
    folder = part_within(resolve_model(run.model.backbone.path), "backbone")
    pretrained = pretrained_tokenizer(folder)
    vocabulary = vocabulary_of(pretrained, str(folder))
    if token_budget(vocabulary, run.corpus.max_length) < 1:
        raise ConfigError(
            f"corpus.max_length is {run.corpus.max_length}, but special tokens alone take "
            f"{len(vocabulary.prefix) + len(vocabulary.suffix)} tokens of it; set a higher "
            "corpus.max_length"
        )
    texts = found.texts
    writer = ArtifactWriter(
        context.storage,
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

    def make() -> DatasetArtifact:
        task = MakeSequences(writer.parts_folder, texts, run.corpus, run.model)
        what = f"sequences {texts.name}"
        results = run_resumable(writer.folder, what, task, found.items, context.execute)
        parts = [part for result in results for part in result["parts"]]
        return writer.finish(results, parts, languages=_languages(results))

    made = writer.get_or_make(make)
    _accept(found, made.manifest)
    return made


def _usable(
    rows: Iterable[Text | RejectedRow], rejected: Counter[str], examples: list[dict[str, str]]
) -> Iterator[Text]:
    """Yield the usable texts; count rejected ones by reason and keep some as examples."""
    for row in rows:
        if isinstance(row, Text):
            yield row
            continue
        rejected[row.reason] += 1
        if len(examples) < EXAMPLES_PER_ITEM:
            examples.append({"reason": row.reason, "row": row.shown})


def _at_once(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """Group texts into batches for one tokenizer call, with fewer texts in a batch if they are
    long.
    """
    some: list[Text] = []
    characters = 0
    for text in texts:
        some.append(text)
        characters += len(text.text)
        if len(some) == _TEXTS_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            yield some
            some, characters = [], 0
    if some:
        yield some


def _languages(results: Iterable[Result]) -> dict[str, dict[str, int]]:
    total: dict[str, Counter[str]] = {}
    for result in results:
        for code, counts in result["languages"].items():
            total.setdefault(code, Counter()).update(counts)
    return {code: dict(counts) for code, counts in sorted(total.items())}


def _accept(found: FoundTexts, totals: Mapping[str, Any]) -> None:
    """Raise if no sequence was made or if too many rows were rejected."""
    rows_in, rejected = int(totals["rows_in"]), sum(totals["rejected"].values())
    reasons = counts_of(totals["rejected"])
    shown = "".join(
        f"\n  {e['reason']}: {e['row']}" for e in totals["examples"][:EXAMPLES_PER_ITEM]
    )
    name, path = found.texts.name, found.texts.source.path
    share = found.texts.source.max_rejected_share
    if not totals["rows_out"]:
        raise DataError(
            f"the texts {name!r} are empty: {path!r} has {rows_in} rows, and none is usable "
            f"({reasons or 'no rows at all'}){shown}"
        )
    if rejected > share * rows_in:
        raise DataError(
            f"the texts {name!r}: {rejected} of {rows_in} rows of {path!r} were rejected "
            f"({reasons}), more than the share source.max_rejected_share={share}; correct the "
            f"rows or raise the share. For instance:{shown}"
        )


@lru_cache(maxsize=2)
def _tokenizer_in(folder: str) -> tuple[Any, MaskingVocabulary]:
    """Load a folder's tokenizer once in each process and cache it for further tasks."""
    pretrained = without_settings(pretrained_tokenizer(Path(folder)))
    return pretrained.backend_tokenizer, vocabulary_of(pretrained, folder)


def prepare_sequences(run: Adaptation, context: PipelineContext) -> str:
    """Make the sequences and their plan, or reuse earlier ones; return the plan's folder.

    Raises:
        ConfigError, DataError, AssetError: a source is missing, empty, has too many bad rows or
            lacks a column; a language has too few texts for a batch.
    """
    found = [find_texts(texts, run.corpus.root) for texts in run.corpus.texts]
    made = {one.texts.name: make_sequences(context, run, one) for one in found}
    return write_sequence_plan(context, run, made).files.folder
