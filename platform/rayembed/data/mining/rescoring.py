"""Rescore positives and candidates with a cross-encoder, whose scores replace the teacher's in the
mining rule.

The model stays loaded in the process that uses it. N rows, C places of a list.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rayembed.assets.resolver import resolve_model
from rayembed.assets.sentence_modules import no_pickled_objects
from rayembed.config.backbone import Dtype
from rayembed.config.mining import CrossEncoder
from rayembed.data.mining.candidates import NEAR_DUPLICATE, MinedCandidates, copies_among, refused
from rayembed.data.vectors.teacher import narrow_linear_layers, take_free_threads
from rayembed.display.progress import piece, pieces, tell
from rayembed.errors import AssetError, DataError
from rayembed.machine.hardware import auto_precision
from rayembed.models.loading.backbones import num_positions
from rayembed.models.passes.fitting import room_for
from rayembed.models.passes.passes import ahead, passes

Scorer = Callable[[Sequence[tuple[str, str]]], np.ndarray]
"""Scores n query-document pairs: (n,) float32 in [0, 1]."""

_QUERIES_AT_A_TIME = 512
"""Queries whose candidate texts are in memory together."""

_OF_CANDIDATES = 0.9
"""Share of the progress display for scoring candidates; scoring positives is the rest."""

_TOKENS_PER_BATCH_GPU = 65_536
_TOKENS_PER_BATCH_CPU = 4096
"""Tokens of a micro-batch, as of a teacher."""

_PAIRS_TOKENISED = 2048
"""Number of similarly long pairs that are tokenised together while earlier ones are scored."""


def load_cross_encoder(config: CrossEncoder, weights: str, device: str = "cpu") -> Scorer:
    """Load the cross-encoder on `device`, once for each process.

    Its single output passes through a sigmoid, whatever the model's own activation, so that rules
    relative to the positive's score have a zero point.

    Args:
        weights: fingerprint of the weights; other weights of the same name are loaded again.

    Raises:
        AssetError: the model is no cross-encoder, or gives more than one number for a pair.
    """
    dtype: Dtype = auto_precision(device).dtype if config.dtype == "auto" else config.dtype
    return _load(config.model, weights, config.max_length, device, dtype)


def release_cross_encoder() -> None:
    """Release the cross-encoder that this process keeps loaded."""
    _load.cache_clear()


def check_cross_encoder(folder: Path, reference: str) -> None:
    """Check that the folder holds a cross-encoder with a trained head that gives one score for a
    pair.

    From any other model transformers would make a classifier with random weights. Only the names of
    the weights are read.

    Raises:
        AssetError: it is none, or gives more than one number for a pair.
    """
    import transformers

    wrong = f"{reference!r}: rescoring needs a cross-encoder (a reranker)"
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        names = [str(name) for name in config.architectures or ()]
        if not any(name.endswith("ForSequenceClassification") for name in names):
            raise AssetError(
                f"{wrong} with an architecture whose name ends in ForSequenceClassification; this "
                "model has the architecture "
                f"{' or '.join(names) or 'unknown, as its config.json names none'}"
            )
        if config.num_labels != 1:
            raise AssetError(
                f"{wrong} that gives one score for a pair of texts; this model gives "
                f"{config.num_labels} numbers for a pair"
            )
        with torch.device("meta"):
            model = transformers.AutoModelForSequenceClassification.from_config(
                config, trust_remote_code=False
            )
        body = f"{model.base_model_prefix}."
        head = {name for name in model.state_dict() if not name.startswith(body)}
        missing = sorted(head - _saved_names(folder))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise AssetError(f"{wrong}; this model cannot be read: {error}") from error
    if missing:
        raise AssetError(f"{wrong} with trained weights; this model lacks {', '.join(missing)}")


def _saved_names(folder: Path) -> set[str]:
    """Names of the weights in a model folder."""
    names: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    if not names:
        for path in sorted(folder.glob("pytorch_model*.bin")):
            with no_pickled_objects(path):
                names.update(torch.load(path, map_location="meta", mmap=True, weights_only=True))
    return names


def rescore(
    lists: Sequence[MinedCandidates],
    query_of: np.ndarray,
    queries: Sequence[str],
    positives: Sequence[Sequence[str]],
    read_texts: Callable[[Collection[int]], Mapping[int, str]],
    similarity: float | None,
    score: Scorer,
) -> tuple[list[MinedCandidates], list[np.ndarray], np.ndarray]:
    """Score the open candidates of the teachers' lists with the cross-encoder.

    Args:
        lists: one of each teacher; a document that stands in several, or in those of several rows
            that ask the same, is scored once for a query.
        query_of: the query of each row.
        queries: texts, by query.
        positives: texts of each query.
        similarity: Jaccard similarity from which a candidate is a copy of a positive, as in
            `copies_among`; copies are refused and not scored.

    Returns:
        The lists without copies of positives; for each (N, C) float32 scores in [0, 1], `-inf`
        where nothing is open; and float32 scores of all positives, query by query.
    """
    copies = [np.zeros(one.ids.shape, dtype=bool) for one in lists]
    scores = [np.full(one.ids.shape, -np.inf, dtype=np.float32) for one in lists]
    of_positives = [np.empty(0, dtype=np.float32)]
    by_query = np.argsort(query_of, kind="stable")
    for start in pieces(range(0, len(queries), _QUERIES_AT_A_TIME)):
        some = range(start, min(start + _QUERIES_AT_A_TIME, len(queries)))
        edges = np.searchsorted(query_of[by_query], [some.start, some.stop])
        rows = by_query[slice(*edges)].tolist()
        open_ = {row: _open_documents(lists, row) for row in rows}
        texts = read_texts(set().union(*open_.values()))
        copied = copies_among(open_, texts, query_of, queries, positives, similarity)
        open_ = {row: documents - copied[row] for row, documents in open_.items()}
        pairs = sorted({(int(query_of[row]), document) for row in rows for document in open_[row]})
        with piece(0.0, _OF_CANDIDATES):
            found = score([(queries[query], texts[document]) for query, document in pairs])
        of_pair = dict(zip(pairs, found.tolist(), strict=True))
        for row in rows:
            query = int(query_of[row])
            for teacher, one in enumerate(lists):
                for column in np.flatnonzero(one.open[row]).tolist():
                    of_document = of_pair.get((query, int(one.ids[row, column])))
                    if of_document is None:
                        copies[teacher][row, column] = True
                    else:
                        scores[teacher][row, column] = of_document
        with piece(_OF_CANDIDATES, 1.0):
            of_positives.append(
                score([(queries[query], text) for query in some for text in positives[query]])
            )
    left = [refused(one, (NEAR_DUPLICATE, copy)) for one, copy in zip(lists, copies, strict=True)]
    return left, scores, np.concatenate(of_positives)


def _open_documents(lists: Sequence[MinedCandidates], row: int) -> set[int]:
    return {int(d) for one in lists for d in one.ids[row][one.open[row]]}


@lru_cache(maxsize=1)
def _load(reference: str, weights: str, max_length: int, device: str, dtype: Dtype) -> Scorer:
    """Load the cross-encoder; its linear layers compute in `dtype`, except those that give the
    score.
    """
    model = _model(reference, max_length, device, dtype)
    budget = _TOKENS_PER_BATCH_CPU if device == "cpu" else _TOKENS_PER_BATCH_GPU
    pad, further = partial(_padded, model.tokenizer), dict[str, Any]()

    def scored(batch: dict[str, Tensor]) -> Tensor:
        return torch.sigmoid(model({**further, **batch})["scores"].float()).reshape(-1)

    def score(pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        scores = np.empty(len(pairs), dtype=np.float32)
        order = np.argsort([-len(query) - len(text) for query, text in pairs], kind="stable")
        parts = [order[n : n + _PAIRS_TOKENISED] for n in range(0, len(order), _PAIRS_TOKENISED)]
        done = 0

        def ready(part: np.ndarray) -> tuple[np.ndarray, list[dict[str, Tensor]]]:
            rows, rest = _tokenized(model, [pairs[place] for place in part])
            further.update(rest)
            return part, rows

        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if dtype == "bfloat16":  # casts what goes into linear layers and attention
                kind = torch.device(device).type
                stack.enter_context(torch.autocast(kind, torch.bfloat16))
            for part, rows in stack.enter_context(closing(ahead(ready, parts, 1))):
                lengths = [len(row["attention_mask"]) for row in rows]
                found = passes(model, rows, lengths, budget, scored, collate=(pad,))
                for chosen, made in found:
                    scores[part[chosen]] = made.numpy()
                    done += len(chosen)
                    tell(done / len(pairs))
        bad = np.flatnonzero(~np.isfinite(scores))
        if len(bad):
            query, text = pairs[bad[0]]
            raise DataError(
                f"the cross-encoder {reference!r} gives scores such as {scores[bad[0]]} for "
                f"{len(bad)} of {len(pairs)} pairs; the first such pair is {query[:200]!r} and "
                f"{text[:200]!r}. Choose another cross-encoder"
            )
        return scores

    return score


def _model(reference: str, max_length: int, device: str, dtype: Dtype) -> Any:
    """Load the sentence-transformers cross-encoder and set it up for `passes`, which runs its
    micro-batches.
    """
    from sentence_transformers import CrossEncoder as Model

    if device == "cpu":
        take_free_threads("a reranker")  # as a teacher
    folder = resolve_model(reference)
    check_cross_encoder(folder, reference)
    with room_for(f"the reranker {reference!r}"):
        model: Any = Model(str(folder), device=device, local_files_only=True).eval()
    halved = dtype == "bfloat16"
    if halved:
        body = getattr(model.model, model.model.base_model_prefix)
        # Never the whole model: that would round the angles of positions.
        narrow_linear_layers(body)
        inside = set(body.modules())
        named = [
            name for name, m in model.named_modules() if type(m) is nn.Linear and m not in inside
        ]
        model.set_keep_in_fp32_modules([*(model.keep_in_fp32_modules or ()), *named])
    else:
        model.float()
    # Tokens beyond the positions that the model has learnt would fail in the middle of the job.
    limits = (max_length, model.tokenizer.model_max_length, num_positions(model))
    model.max_seq_length = min(limit for limit in limits if limit is not None)
    model.unpadded = "never"  # for `passes`
    return model


def _tokenized(
    model: Any, pairs: Sequence[tuple[str, str]]
) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Tokenise pairs: the model's inputs of each pair without padding, and inputs that all pairs
    share.
    """
    made = model.preprocess(list(pairs), prompt=model.prompts.get(model.default_prompt_name))
    mask = made["attention_mask"].bool()
    arrays = {
        name: value
        for name, value in made.items()
        if isinstance(value, Tensor) and value.shape == mask.shape
    }
    rows = [{name: value[n][mask[n]] for name, value in arrays.items()} for n in range(len(mask))]
    return rows, {name: value for name, value in made.items() if name not in arrays}


def _padded(tokenizer: Any, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the inputs of several pairs into a micro-batch, padded on the side that the tokenizer
    pads.
    """
    fill = {
        "input_ids": tokenizer.pad_token_id or 0,
        "token_type_ids": tokenizer.pad_token_type_id,
    }
    return {
        name: nn.utils.rnn.pad_sequence(
            [row[name] for row in rows],
            batch_first=True,
            padding_value=fill.get(name, 0),
            padding_side=tokenizer.padding_side,
        )
        for name in rows[0]
    }
