"""Preparation of an adaptation: from its texts to its plan. Independent of Ray."""

from collections.abc import Sequence

from rayembed.config.adaptation import Adaptation
from rayembed.data.artifacts import PipelineContext
from rayembed.data.mlm.make import make_sequences
from rayembed.data.mlm.plan import write_sequence_plan
from rayembed.data.mlm.texts import FoundTexts, find_texts


def find_corpus(run: Adaptation) -> list[FoundTexts]:
    """Locate the files of all text sets before any row is read; raises as `find_texts`."""
    return [find_texts(texts, run.corpus.root) for texts in run.corpus.texts]


def prepare_sequences(
    run: Adaptation, context: PipelineContext, found: Sequence[FoundTexts] | None = None
) -> str:
    """Folder of the finished plan; earlier results are reused.

    Args:
        found: what `find_corpus` gave; None: it is looked for here.

    Raises:
        ConfigError, DataError, AssetError: a source is missing, empty, has too many bad rows or
            lacks a column; a language has too few texts for a batch.
    """
    made = {one.texts.name: make_sequences(context, run, one) for one in found or find_corpus(run)}
    return write_sequence_plan(context, run, made).files.folder
