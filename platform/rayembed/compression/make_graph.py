"""From a model to a folder of its graphs: trace, convert, compare with the model, write."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rayembed.assets.finite import check_finite
from rayembed.compression.contract import CalibrationText, Compressed, Source
from rayembed.compression.matrices import Matrix, matrices_of, shares
from rayembed.compression.prune import empty_model, write_told
from rayembed.compression.trace import prepare, trace, write_onnx
from rayembed.config.graph import GraphConfig
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.compressed import read_compression, write_compression
from rayembed.models.contract import Tokens
from rayembed.models.encoding import PROBES, corpus_context, encode_tokens
from rayembed.models.export import check_target, new_folder, write_graph_files
from rayembed.models.load import load_model
from rayembed.models.runtime_model import no_training
from rayembed.models.saved_folder import SETTINGS_FILE, read_graph
from rayembed.models.saved_prompts import saved_instructions
from rayembed.models.transformer_model import TransformerModel

if TYPE_CHECKING:
    from rayembed.compression.cpu_graph import CpuGraph

logger = logging.getLogger(__name__)

LARGEST_BYTES = 2_000_000_000
"""Maximum weights of a model in float32: one file of ONNX holds 2 GiB."""

_FLOAT_ERROR = 1e-4
"""Maximum difference of a float32 graph's unit vectors from the model's, number by number."""


def check_traceable(way: "CpuGraph", folder: Path) -> None:
    """Check that a model has a graph, by tracing it without its weights.

    Raises:
        ArtifactError: no model that can be loaded.
        ConfigError: it is a graph already, or cannot become one, with the reason.
    """
    _check_weights(folder)
    model = empty_model(folder).eval()
    _check_size(model)
    if way.precision != "float32":
        matrices_of(model, way.skip)
    if (folder / SETTINGS_FILE).is_file():
        trace(model)  # one in a published layout is traced when it is loaded, before all else


def make_graph(way: "CpuGraph", source: Source, output: Path) -> Compressed:
    """Write the graphs of a model into the folder `output`; raises as `CpuGraph.compress`, and an
    ArtifactError where a weight is not finite, or what the model gives for a text.
    """
    check_target(output)
    _check_weights(source.folder)
    if way.precision == "int8-static" and len(source.texts) < way.fewest_texts:
        raise ConfigError(
            f"precision = 'int8-static' takes ranges from calibration texts; {len(source.texts)} "
            f"are given and {way.fewest_texts} are the least. Give more, or take int8-dynamic"
        )
    model = load_model(source.folder, dtype="float32").eval()
    check_finite(model.state_dict().items(), f"the model {str(source.folder)!r}")
    model.check_passes(f"the model {str(source.folder)!r}")
    _check_size(model)
    chosen = [] if way.precision == "float32" else matrices_of(model, way.skip)
    tokens = _tokens(model, source.texts[: way.max_texts])
    by_part = shares(model, chosen)
    told = Compressed(
        weights=sum(whole for whole, _ in by_part.values()),
        compressed=sum(changed for _, changed in by_part.values()),
        by_part=by_part,
    )
    graph = GraphConfig(
        runtime=way.runtime,
        precision=way.precision,
        floats=way.floats,
        file=f"graph{way.suffix}",
        context_file=f"context{way.suffix}" if model.uses_context else None,
        context_width=model.no_context().shape[1] if model.uses_context else 0,
        max_context=model.max_context,
        added_tokens=model.added_tokens,
    )
    context = _context(model, source.texts) if model.uses_context else None
    instructions = saved_instructions(source.folder, model.config)
    with new_folder(output) as written:
        written.mkdir()
        write_graph_files(model, written, graph, instructions=instructions)
        _write_graph(way, model, chosen, written / graph.file, _inputs(model, tokens, context))
        if graph.context_file is not None:
            batches = _inputs(model, tokens, None)
            _write_graph(way, model, chosen, written / graph.context_file, batches, context=True)
        _check_number(way, written, graph, told.compressed)
        write_told(way, told, source.folder, written)
        apart = _compare(way, model, load_model(written), tokens, context)
        write_compression(written, {**(read_compression(written) or {}), **apart})
    return told


def _check_weights(folder: Path) -> None:
    graph = read_graph(folder)
    if graph is not None:
        raise ConfigError(no_training(folder, graph))


def _check_size(model: TransformerModel) -> None:
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    if size > LARGEST_BYTES:
        raise ConfigError(
            f"the model has {size / 1e9:.1f} GB in float32, and a graph's file holds "
            f"{LARGEST_BYTES / 1e9:.1f}; take a smaller model, or int8 weights for torch"
        )


def _write_graph(
    way: "CpuGraph",
    model: TransformerModel,
    chosen: Sequence[Matrix],
    target: Path,
    batches: Sequence[Mapping[str, np.ndarray]],
    *,
    context: bool = False,
) -> None:
    """Write one graph beside which nothing is left of the way to it."""
    plain = target.with_name(f"plain-{target.stem}.onnx")
    write_onnx(model, plain, context=context)
    products = prepare(plain, chosen, model)
    way.convert(plain, target, products, batches)
    for left in target.parent.glob(f"{plain.stem}*"):
        left.unlink()


def _tokens(model: TransformerModel, texts: Sequence[CalibrationText]) -> list[Tokens]:
    given = texts or [CalibrationText(text) for text in PROBES]
    return [
        model.tokenizer(
            [one.text],
            one.role,
            [model.instruction_of(one.role, one.instruction)],
            allow_empty=True,
        )[0]
        for one in given
    ]


def _context(model: Any, texts: Sequence[CalibrationText]) -> Tensor:
    """(n, C) context of the model's corpus, or of the calibration texts' documents."""
    if model.corpus is not None and len(model.corpus):
        corpus: Tensor = model.corpus
        return corpus
    documents = [one.text for one in texts if one.role == "document"] or list(PROBES)
    found = corpus_context(model, documents)
    return model.no_context() if found is None else found


@torch.inference_mode()
def _inputs(
    model: TransformerModel, tokens: Sequence[Tokens], context: Tensor | None
) -> list[dict[str, np.ndarray]]:
    """Each text as a graph's micro-batch; without padding, which is no part of any text."""
    more = {} if context is None else {"context": context.numpy()}
    return [
        {name: value.numpy() for name, value in model.tokenizer.collate([one]).items()} | more
        for one in tokens
    ]


def _check_number(way: "CpuGraph", folder: Path, graph: GraphConfig, asked: int) -> None:
    """Count the int8 weights of what was written.

    Raises:
        ArtifactError: they are not those that were asked for.
    """
    files = [name for name in (graph.file, graph.context_file) if name is not None]
    found = sum(way.int8_weights(folder / name) for name in files)
    if found != asked:
        raise ArtifactError(
            f"{way.label}: {asked} weights were to become int8, and {found} of the written graph "
            "are; nothing is left of the attempt"
        )


def _compare(
    way: "CpuGraph",
    model: TransformerModel,
    graph: TransformerModel,
    tokens: Sequence[Tokens],
    context: Tensor | None,
) -> dict[str, float]:
    """Mean and lowest cosine between both models' vectors, over micro-batches of many sizes.

    Raises:
        ArtifactError: they are further apart than the way allows.
    """
    before = encode_tokens(model, tokens, context=context)
    after = encode_tokens(graph, tokens, context=context)
    cosines = (before * after).sum(axis=1)
    apart = {"cosine_mean": float(cosines.mean()), "cosine_lowest": float(cosines.min())}
    largest = float(np.abs(before - after).max())
    exact = way.precision == "float32" and way.floats == "float32"
    # Written so that NaN fails.
    if not (largest <= _FLOAT_ERROR if exact else apart["cosine_mean"] >= way.least_cosine):
        raise ArtifactError(
            f"{way.label}: the graph's vectors have a mean cosine of {apart['cosine_mean']:.4f} "
            f"with the model's over {len(tokens)} texts, and differ by up to {largest:.2g}; "
            + (
                f"allowed is {_FLOAT_ERROR:g}"
                if exact
                else f"asked is least_cosine={way.least_cosine:g}. Leave sensitive matrices alone "
                "by skip, or take another precision"
            )
        )
    logger.info("%s: mean cosine with the model %.5f", way.label, apart["cosine_mean"])
    return apart
