"""Preparation of an adaptation: from its texts to its plan. Independent of Ray."""

from collections.abc import Sequence

from rayembed.config.adaptation import Adaptation
from rayembed.data.prepared import Workshop
from rayembed.data.sequences.make import make_sequences
from rayembed.data.sequences.plan import write_sequence_plan
from rayembed.data.sequences.texts import FoundTexts, find_texts


def find_corpus(run: Adaptation) -> list[FoundTexts]:
    """Locate the files of all text sets before any row is read; raises as `find_texts`."""
    return [find_texts(texts, run.corpus.root) for texts in run.corpus.texts]


def prepare_sequences(
    run: Adaptation, workshop: Workshop, found: Sequence[FoundTexts] | None = None
) -> str:
    """Folder of the finished plan; earlier results are reused.

    Args:
        found: what `find_corpus` gave; None: it is looked for here.

    Raises:
        ConfigError, DataError, AssetError: a source is missing, empty, has too many bad rows or
            lacks a column; a language has too few texts for a batch.
    """
    made = {one.texts.name: make_sequences(workshop, run, one) for one in found or find_corpus(run)}
    return write_sequence_plan(workshop, run, made).files.folder
