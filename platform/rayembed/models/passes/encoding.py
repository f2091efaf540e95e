"""Embed many texts: each distinct text once, sorted by length, in batches of limited token
count.

The next texts are tokenised, and for a GPU collated, by threads while the device computes.
"""

import heapq
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import get_args

import numpy as np
import torch
import xxhash
from torch import Tensor

from rayembed.config.settings import nearest
from rayembed.config.types import Role, has_content
from rayembed.errors import ArtifactError, ConfigError, DataError
from rayembed.models.contract import EmbeddingModel, EmbedOutput, Tokens, cost
from rayembed.models.passes.passes import ahead, passes

_TEXTS_PER_TOKENIZER_CALL = 4096
_CPU_TEXTS, _GPU_TEXTS = 65_536, 2048
"""Texts that are tokenised and sorted by length together, while those before them are embedded.

On CPUs the tokens' memory decides: tokenising takes from encoding what it gains. A GPU waits for
the first texts alone, and packs what is not sorted as well."""
_CPU_TOKENS, _GPU_TOKENS = 2048, 16384
_SMALL_MODEL, _GPU_TOKENS_OF_SMALL = 10**9, 65_536
"""Parameters below which a GPU computes 16,384 tokens faster than the host launches their pass, and
the tokens of a pass then. BERT base's forward passes took 16 ms beside an H200 (the second ones of
GradCache, benchmarks/log), which computes them in 5 by a roofline."""

PROBES = ("Paris", "the quick brown fox jumps over the lazy dog", "7 wonders of the world")
"""Texts that a model is tried on where none are given."""

_NAMED = 5
"""Texts that a message names at most."""

_UNIT_ERROR = 0.01
"""Maximum difference of a vector's length from 1; models normalise in float32."""


@torch.inference_mode()
def encode(
    model: EmbeddingModel,
    texts: str | Sequence[str],
    *,
    role: Role,
    instruction: str | None = None,
    tokens_per_batch: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    allow_empty: bool = False,
    context: Tensor | None = None,
    finite: bool = False,
    count_tokens: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Embed texts to (N, D) float32 unit vectors in the order of the texts; a single text gives
    (D,).

    Runs on the model's device, in evaluation mode; the model's mode is put back afterwards.

    Args:
        instruction: task definition before each text; None: that of the model for the role, if it
            learnt a single one; "": none.
        tokens_per_batch: tokens of a micro-batch, padding included; one longer text makes its own.
            None: on a GPU 16384, of models below a billion parameters 65536; 2048 on a CPU, where
            16384 outgrow the caches (in bfloat16 on two cores: all-MiniLM-L6-v2 147 against 128
            texts a second, SmolLM2-135M 20 against 13).
        progress: called with the number of distinct texts encoded so far, and of all.
        allow_empty: embed texts without a visible character by their special tokens.
        context: what `encode_context` gives for documents of the corpus; None: the corpus that the
            model has, if it uses one at all.
        finite: stop at the first texts whose vectors are not of length 1.
        count_tokens: called with the number of tokens of the next texts.

    Raises:
        ArtifactError: there are such, where `finite` is asked for.
        ConfigError: no such role.
        DataError: no text, or one without a visible character, unless `allow_empty`.
    """
    single = isinstance(texts, str)
    if not single and not isinstance(texts, Iterable):
        raise DataError(f"texts = {texts!r} is neither a text nor a list of texts")
    texts = [texts] if isinstance(texts, str) else list(texts)
    _check(texts, role, allow_empty)
    places: dict[str, int] = {}
    order = np.array([places.setdefault(text, len(places)) for text in texts], dtype=np.int64)
    distinct = list(places)
    told = model.instruction_of(role, instruction)
    device = model.device
    vectors = np.empty((len(distinct), model.dimensions[0]), dtype=np.float32)
    done = 0

    def check(made: np.ndarray, numbers: np.ndarray) -> None:
        wrong = numbers[no_unit_vectors(made)]
        if len(wrong):
            raise _not_finite(texts, np.flatnonzero(np.isin(order, done + wrong)), single)

    def count(of_part: int, _: int) -> None:
        if progress is not None:
            progress(done + of_part, len(distinct))

    def tokenized(part: list[str]) -> list[Tokens]:
        return _tokenize(model, part, role, told, allow_empty)

    size = _CPU_TEXTS if device.type == "cpu" else _GPU_TEXTS
    parts = [distinct[start : start + size] for start in range(0, len(distinct), size)]
    with closing(ahead(tokenized, parts, 1)) as coming:
        for tokens in coming:
            if count_tokens is not None:
                count_tokens(sum(map(cost, tokens)))
            vectors[done : done + len(tokens)] = encode_tokens(
                model,
                tokens,
                tokens_per_batch=tokens_per_batch,
                progress=count,
                context=context,
                check=check if finite else None,
            )
            done += len(tokens)
    return vectors[0] if single else vectors[order]


@torch.inference_mode()
def encode_tokens(
    model: EmbeddingModel,
    tokens: Sequence[Tokens],
    *,
    tokens_per_batch: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    context: Tensor | None = None,
    check: Callable[[np.ndarray, np.ndarray], None] | None = None,
) -> np.ndarray:
    """Embed tokenised texts to (N, D) float32 unit vectors in the order of the texts.

    The texts may be of different roles and instructions. Arguments are those of `encode`, and
    `check`, which is called with the vectors of each micro-batch and the numbers of its texts.
    """
    vectors = np.empty((len(tokens), model.dimensions[0]), dtype=np.float32)
    budget = tokens_per_batch or corpus_budget(model)

    def embed(batch: dict[str, Tensor]) -> Tensor:
        output: EmbedOutput = model(batch) if context is None else model(batch, context)
        return output.embeddings

    with _in_evaluation_mode(model):
        tokens = model.first_pass(tokens, budget)
        costs = [cost(one) + model.added_tokens for one in tokens]
        for chosen, made in _counted(passes(model, tokens, costs, budget, embed), tokens, progress):
            vectors[chosen] = made.numpy()
            if check is not None:
                check(vectors[chosen], np.array(chosen))
    return vectors


@contextmanager
def _in_evaluation_mode(model: EmbeddingModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _counted(
    made: Iterator[tuple[list[int], Tensor]],
    tokens: Sequence[Tokens],
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the results of all micro-batches unchanged, and report the number of finished texts to
    `progress`.
    """
    done = 0
    for chosen, vectors in made:
        yield chosen, vectors
        done += len(chosen)
        if progress is not None:
            progress(done, len(tokens))


@torch.inference_mode()
def encode_context(
    model: EmbeddingModel,
    documents: Sequence[str],
    *,
    tokens_per_batch: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Embed corpus documents to (n, C) float32 context vectors on the CPU, in the order of the
    documents.

    Runs on the model's device, in evaluation mode; the model's mode is put back afterwards. A
    document without tokens of its own counts with its special tokens.

    Args:
        progress: called with the number of documents embedded so far, and of all.
    """
    tokens = _tokenize(model, list(documents), "document", "", True)
    vectors: list[Tensor] = [torch.empty(0)] * len(tokens)
    costs = [cost(one) for one in tokens]
    budget = tokens_per_batch or corpus_budget(model)
    with _in_evaluation_mode(model):
        made_of = passes(model, tokens, costs, budget, model.embed_context)
        for chosen, made in _counted(made_of, tokens, progress):
            for place, vector in zip(chosen, made, strict=True):
                vectors[place] = vector
    return torch.stack(vectors)


def corpus_context(
    model: EmbeddingModel, documents: Iterable[str], *, seed: int = 0
) -> Tensor | None:
    """Embed documents sampled from a corpus to (n, C) context vectors; None if the corpus
    is empty.

    As many as the model takes (`max_context`), by `random_documents`.
    """
    number = model.max_context if model.max_context is not None else sys.maxsize
    chosen = random_documents(documents, number, seed=seed)
    return encode_context(model, chosen) if chosen else None


def check_vectors(model: EmbeddingModel, what: str) -> None:
    """Raise unless the model embeds some short test texts (`PROBES`) to finite unit
    vectors.

    Costs a pass over some 25 tokens, and of a model that takes a context another one for that of
    the same texts. Finite weights alone do not tell: products of large ones overflow, and no pass
    follows the last update of a training.

    Args:
        what: the model, for the message.

    Raises:
        ArtifactError: one is not.
    """
    context = corpus_context(model, PROBES) if model.uses_context else None
    vectors = encode(model, PROBES, role="document", instruction="", context=context)
    wrong = no_unit_vectors(vectors)
    if len(wrong):
        bad = int(wrong[0])
        raise ArtifactError(
            f"{what}: its vectors of {len(wrong)} of {len(PROBES)} short test texts do not have "
            f"length 1 (the vector of {PROBES[bad]!r} begins with {vectors[bad, :3].tolist()}), "
            "although its weights are finite: its activations overflow, so the model is useless "
            "and is not saved. Training diverged, or it started from a diverged model: lower the "
            "learning rate or lengthen the warm-up, and train again under another --name"
        )


def no_unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Return the indices of (N, D) vectors whose norm is not 1, for instance after an overflow or
    NaN.
    """
    # Infinite sums of squares make vectors of zeros. Written so that NaN fails.
    right = np.abs(np.linalg.norm(vectors, axis=1) - 1) < _UNIT_ERROR
    found: np.ndarray = np.flatnonzero(~right)
    return found


def random_documents(documents: Iterable[str], number: int, *, seed: int) -> list[str]:
    """Draw a random sample of distinct documents from a corpus; all of them if it has
    fewer.

    Those with the smallest seeded hashes, in the order of these: the draw depends on what the
    corpus holds, not on how it is ordered or cut, and reads it once. Empty documents are left out.
    """
    if number == 0:
        return []
    # The heap holds the largest hash on top, so that a smaller one takes its place.
    kept: list[tuple[int, str]] = []
    held: set[str] = set()
    for text in documents:
        if text in held or not text.strip():
            continue
        place = xxhash.xxh3_64_intdigest(text.encode(), seed=seed)
        if len(kept) < number:
            heapq.heappush(kept, (-place, text))
        elif -place > kept[0][0]:
            held.remove(heapq.heapreplace(kept, (-place, text))[1])
        else:
            continue
        held.add(text)
    return [text for _, text in sorted((-place, text) for place, text in kept)]


def _check(texts: Sequence[object], role: str, allow_empty: bool) -> None:
    if role not in get_args(Role):
        raise ConfigError(f"role = {role!r}: {nearest(str(role), get_args(Role))}")
    empty: list[int] = []
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(
                f"texts[{place}] is not a text but {repr(text)[:80]} ({type(text).__name__}); "
                "leave it out"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"texts[{place}] ({text[:40]!r}) contains half of a surrogate pair, which is not "
                "a valid character; repair the text or leave it out"
            ) from None
        if not (allow_empty or has_content(text)):
            empty.append(place)
    if empty:
        raise DataError(
            f"{len(empty)} of {len(texts)} texts have no visible character: {_named(empty)}. Leave "
            "them out, or pass allow_empty=True: each then gets the vector of its special tokens, "
            "which does not depend on the text"
        )


def _named(places: Sequence[int]) -> str:
    named = ", ".join(f"texts[{place}]" for place in places[:_NAMED])
    return named + (f" and {len(places) - _NAMED} more" if len(places) > _NAMED else "")


def _not_finite(texts: Sequence[str], places: np.ndarray, single: bool) -> ArtifactError:
    """Make the error for texts whose vectors are not finite or are all zeros."""
    text = texts[places[0]]
    where = "" if single else f": {_named(places.tolist())}"
    return ArtifactError(
        f"the model gives numbers that are not finite, or all zero, for {len(places)} texts"
        f"{where}, the first of which is {text[:80]!r}; no text behind their batch was embedded. "
        "Its weights are damaged, or overflow in its number type: load the model again, in float32 "
        "where it was trained in that, or leave these texts out"
    )


def default_budget(device: torch.device) -> int:
    """Return the default number of tokens in a batch that combines several callers' texts, by
    device.
    """
    return _CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS


def corpus_budget(model: EmbeddingModel) -> int:
    """Return the default number of tokens in a micro-batch when many texts are embedded, by device
    and model size.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    small = model.device.type != "cpu" and parameters < _SMALL_MODEL
    return _GPU_TOKENS_OF_SMALL if small else default_budget(model.device)


def _tokenize(
    model: EmbeddingModel, texts: list[str], role: Role, instruction: str, allow_empty: bool
) -> list[Tokens]:
    tokens: list[Tokens] = []
    for start in range(0, len(texts), _TEXTS_PER_TOKENIZER_CALL):
        part = texts[start : start + _TEXTS_PER_TOKENIZER_CALL]
        instructions = [instruction] * len(part) if instruction else None
        if allow_empty:
            tokens += model.tokenizer(part, role, instructions, allow_empty=True)
        else:
            tokens += model.tokenizer(part, role, instructions)
    return tokens
