"""One worker's input for one step: tokenised distinct texts, and which rows use them.

b rows of this worker, K negative places a row, U distinct texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rayembed.config.types import Role
from rayembed.data.hashes import NO_HASH, text_hash
from rayembed.data.plan.teacher_scores import teacher_scores
from rayembed.data.records import Record
from rayembed.data.words import normalised_hash
from rayembed.models.contract import Tokenizer, Tokens

TextVectors = Callable[[Sequence[tuple[Role, int]]], np.ndarray]
"""Looks up a teacher's vectors of texts by role and hash: (U, T) float16; see `vectors.lookup`."""

NO_TEXT = -1
"""Placeholder in index arrays for a missing negative."""


@dataclass(frozen=True)
class StepBatch:
    """One worker's slice of a global batch: b rows that use U distinct texts."""

    step: int
    tokens: list[Tokens]
    """(U) distinct texts by text, role and instruction, each encoded once."""
    query: np.ndarray
    """(b,) int64 indices into `tokens`."""
    positive: np.ndarray
    """(b,) int64 indices into `tokens`."""
    negatives: np.ndarray
    """(b, K) int64 indices into `tokens`, `NO_TEXT` for missing negatives."""
    in_batch: np.ndarray
    """(b,) bool: the row takes part in in-batch negatives, as query and as source of documents."""
    query_hash: np.ndarray
    """(b,) int64 `normalised_hash` of the query's text, as of all texts below."""
    positive_hash: np.ndarray
    """(b,) int64 hash of the positive's text."""
    negative_hash: np.ndarray
    """(b, K) int64 hash of each negative's text, `NO_HASH` for missing ones."""
    not_negative_hash: np.ndarray
    """(b, P) int64 hashes of texts that are not negatives of the query, padded with `NO_HASH`: its
    positives and the record's false negatives.

    P is the largest number that a row of this worker has.
    """
    label_hash: np.ndarray
    """(b,) int64 hash of data set and class, `NO_HASH` without a class."""
    dataset: list[str]
    """(b) data set names."""
    similarity: np.ndarray
    """(b,) float32 graded similarity of query and positive in [0, 1]; NaN: the row has none."""
    positive_score: np.ndarray
    """(b,) float32 score of the positive by the model that scored the row's negatives: the
    cross-encoder where it rescored, else the teacher; NaN: nothing was mined for the row."""
    negative_score: np.ndarray
    """(b, K) float32 score of each negative by the same model; NaN: missing, or not mined."""
    further_positives: np.ndarray
    """(b, P) int64 indices into `tokens` of the positives that the step trains besides the first,
    each text once; `NO_TEXT` for missing ones. P is the largest number of a row of this worker."""
    teacher_vectors: tuple[np.ndarray, ...] = ()
    """Teacher vectors of the texts, one tensor for each of the stage's teachers: (U, T) float16
    unit vectors of the distinct texts."""

    def occurrences(self) -> np.ndarray:
        """(U,) int64 number of times that the worker's rows use each text."""
        several = self.negatives.ravel(), self.further_positives.ravel()
        places = np.concatenate([self.query, self.positive, *several])
        return np.bincount(places[places != NO_TEXT], minlength=len(self.tokens))


def make_step_batch(
    step: int,
    records: Sequence[Record],
    num_negatives: int,
    tokenizer: Tokenizer,
    teachers: Sequence[TextVectors] = (),
    num_positives: int = 1,
) -> StepBatch:
    """Build the step batch of records, using the first positives and the first `num_negatives`
    negatives of each.

    The plan has put at the front which of a record's positives the step trains; all others are
    known as no negatives.

    Args:
        teachers: give the vectors of all texts.
        num_positives: how many positives of a record the step trains, if it has so many.

    Raises:
        DataError: a text tokenises to nothing, or a teacher has no vector of it.
    """
    places: dict[tuple[str, Role, str], int] = {}

    def place(text: str, role: Role, instruction: str) -> int:
        return places.setdefault((text, role, instruction), len(places))

    rows, negatives, hashes, scores = len(records), [], [], list[float | None]()
    query = [place(r.query, "query", r.query_instruction) for r in records]
    positive = [place(r.positives[0], "document", r.document_instruction) for r in records]
    further = [_further(r.positives, num_positives) for r in records] if num_positives > 1 else []
    more = np.full((rows, max(map(len, further), default=0)), NO_TEXT, dtype=np.int64)
    for i, (r, others) in enumerate(zip(records, further, strict=False)):
        more[i, : len(others)] = [place(t, "document", r.document_instruction) for t in others]
    for r in records:
        texts = [n.text for n in r.negatives[:num_negatives]]
        short = num_negatives - len(texts)
        found = [place(t, "document", r.document_instruction) for t in texts]
        negatives.append(found + [NO_TEXT] * short)
        hashes.append([normalised_hash(t) for t in texts] + [NO_HASH] * short)
        scores += [*teacher_scores(r)[1][:num_negatives], *[None] * short]
    kept_out = [[*map(normalised_hash, r.positives), *r.false_negatives] for r in records]
    not_negative = np.full((rows, max(map(len, kept_out), default=1)), NO_HASH, dtype=np.int64)
    for i, found in enumerate(kept_out):
        not_negative[i, : len(found)] = found
    return StepBatch(
        step=step,
        tokens=_tokenize(list(places), tokenizer),
        query=np.array(query, dtype=np.int64),
        positive=np.array(positive, dtype=np.int64),
        negatives=np.array(negatives, dtype=np.int64).reshape(rows, num_negatives),
        in_batch=np.array([r.in_batch for r in records], dtype=bool),
        query_hash=np.array([normalised_hash(r.query) for r in records], dtype=np.int64),
        positive_hash=np.array([normalised_hash(r.positives[0]) for r in records], dtype=np.int64),
        negative_hash=np.array(hashes, dtype=np.int64).reshape(rows, num_negatives),
        not_negative_hash=not_negative,
        label_hash=np.array(
            [text_hash(f"{r.dataset}\0{r.label}") if r.label else NO_HASH for r in records],
            dtype=np.int64,
        ),
        dataset=[r.dataset for r in records],
        similarity=_floats([r.similarity for r in records]),
        positive_score=_floats([teacher_scores(r)[0] for r in records]),
        negative_score=_floats(scores).reshape(rows, num_negatives),
        further_positives=more,
        teacher_vectors=tuple(
            teacher([(role, text_hash(text)) for text, role, _ in places]) for teacher in teachers
        ),
    )


def _further(positives: Sequence[str], number: int) -> list[str]:
    """Positives after the first, up to `number` with it, each text once."""
    distinct: dict[int, str] = {}
    for text in positives:
        distinct.setdefault(normalised_hash(text), text)
    return list(distinct.values())[1:number]


def _floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float32)


def _tokenize(keys: list[tuple[str, Role, str]], tokenizer: Tokenizer) -> list[Tokens]:
    tokens: list[Tokens | None] = [None] * len(keys)
    roles: tuple[Role, ...] = ("query", "document")
    for role in roles:
        chosen = [i for i, key in enumerate(keys) if key[1] == role]
        made = tokenizer([keys[i][0] for i in chosen], role, [keys[i][2] for i in chosen])
        for i, found in zip(chosen, made, strict=True):
            tokens[i] = found
    return [t for t in tokens if t is not None]
