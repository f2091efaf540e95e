"""Calibration: record statistics of each matrix's inputs layer by layer, and compress the matrices
with them.

The first layer's inputs are caught for all texts. Each layer is then run on its inputs, which gives
statistics of what its matrices multiply; these are solved; and the layer is run again, so that the
next one meets inputs as the compressed model makes them (SparseGPT, arXiv 2301.00774; Wanda, arXiv
2306.11695; GPTQ, arXiv 2210.17323). A model of several transformers goes through that one by one,
the one whose output another reads first.

Texts of one micro-batch have the same number of tokens, so that there is no padding that could
count. B texts, T tokens, H inputs of a matrix, N rows of them.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rayembed.config.backbone import Dtype
from rayembed.config.types import Role
from rayembed.errors import ArtifactError, ConfigError
from rayembed.machine.hardware import auto_precision, default_device, say_once
from rayembed.models.contract import Tokens, to_device
from rayembed.models.layers import layers_of
from rayembed.models.loading.load import load_model, saved_dtype
from rayembed.models.passes.encoding import corpus_context, default_budget
from rayembed.models.transformer_model import TransformerModel
from rayembed_extras.compression.contract import Calibrated, CalibrationText, Compression
from rayembed_extras.compression.matrices import Matrix, inputs_of

logger = logging.getLogger(__name__)

_CHAIN_TOLERANCE = 1e-2
"""Largest relative error of a recomputed layer input; bfloat16 rounding reaches it when another
kernel runs."""


class Statistic(Protocol):
    """Running statistics of the inputs of one matrix."""

    rows: int
    """Number of inputs N so far."""

    def add(self, rows: Tensor) -> None:
        """Add inputs (N, H) to the statistics."""
        ...


class Solver(Protocol):
    """Interface of a method that compresses a matrix using statistics of its inputs."""

    def begin(self, weight: Tensor) -> Statistic:
        """Create empty statistics for the inputs of a matrix (F, H)."""
        ...

    def solve(self, weight: Tensor, statistic: Any, name: str) -> None:
        """Change the matrix in place, using the statistics; `name` is for messages."""
        ...


Run = Callable[[], object]
"""One forward pass through a transformer."""


def check_texts(way: Compression, texts: Sequence[CalibrationText]) -> None:
    """Check that there are enough texts for a method that needs calibration.

    Raises:
        ConfigError: there are fewer.
    """
    if isinstance(way, Calibrated) and len(texts) < way.minimum_texts:
        raise ConfigError(
            f"{way.kind} needs minimum_texts = {way.minimum_texts} calibration texts, but got "
            f"{len(texts)}; give more texts of the kind that the model embeds, or lower "
            "minimum_texts"
        )


def check_layers(way: Compression, model: TransformerModel) -> None:
    """Check that a forward pass runs each layer of the transformers exactly once, as calibration
    requires.

    Raises:
        ConfigError: a family that runs the same layer several times, such as ALBERT.
    """
    if not isinstance(way, Calibrated):
        return
    for name, part in model.parts.items():
        found = len(layers_of([part]))
        stated = int(getattr(part.config, "num_hidden_layers", found))
        if found != stated:
            raise ConfigError(
                f"{way.kind} compresses one layer after the other and needs each layer to run "
                f"once, but the {name} runs its {found} layers {stated} times; use a method "
                "without calibration texts, such as int8"
            )


def loaded_as_saved(way: Compression, folder: Path) -> TransformerModel:
    """Load a model in the number type in which it will be saved, on a GPU if available. Calibration
    that will be slow in that type is warned of.
    """
    device, saved = default_device(), saved_dtype(folder)
    if isinstance(way, Calibrated):
        _warn_of_saved(saved, device, f"calibration of {way.kind}")
    return load_model(folder, dtype=saved, device=device)


@torch.no_grad()
def solve_layers(
    model: TransformerModel,
    matrices: Sequence[Matrix],
    texts: Sequence[CalibrationText],
    solver: Solver,
) -> None:
    """Compress all matrices of a model in place, layer after layer; each layer's inputs come from
    compressed earlier layers.

    Raises:
        ConfigError: a family whose layers do not simply follow one another.
    """
    model.eval()
    names = sorted(model.parts, key=lambda name: name == "backbone")
    solved: set[str] = set()
    for name in names:
        layers = layers_of([model.parts[name]])
        inside = [
            [matrix for matrix in matrices if any(matrix.module is one for one in layer.modules())]
            for layer in layers
        ]
        if any(inside):
            _solve_part(name, layers, inside, _runs(model, name, texts), solver)
            solved.update(matrix.name for own in inside for matrix in own)
    outside = [matrix for matrix in matrices if matrix.name not in solved]
    if outside:
        parts = names if model.uses_context else ["backbone"]
        runs = [run for name in parts for run in _runs(model, name, texts)]
        with _watching(outside, solver) as statistics:
            for run in runs:
                run()
        _solve(outside, statistics, solver)


def equal_batches(model: TransformerModel, tokens: Sequence[Tokens]) -> Iterator[dict[str, Tensor]]:
    """Yield collated micro-batches of texts with the same number of tokens, on the model's
    device.
    """
    device = next(model.parameters()).device
    by_lengths: dict[tuple[tuple[str, int], ...], list[Tokens]] = defaultdict(list)
    for one in tokens:
        by_lengths[tuple(sorted((name, len(value)) for name, value in one.items()))].append(one)
    for lengths in sorted(by_lengths):
        alike = by_lengths[lengths]
        number = max(1, default_budget(device) // max(length for _, length in lengths))
        for start in range(0, len(alike), number):
            batch = model.tokenizer.collate(alike[start : start + number])
            masks = [value for name, value in batch.items() if name.endswith("attention_mask")]
            assert all(bool(mask.all()) for mask in masks)
            yield to_device(batch, device)


def tokens_of(model: TransformerModel, texts: Sequence[CalibrationText]) -> list[Tokens]:
    """Tokenise the texts, each in its role and with its own instruction or the model's
    default one.
    """
    by_role: dict[Role, list[CalibrationText]] = defaultdict(list)
    for text in texts:
        by_role[text.role].append(text)
    tokens: list[Tokens] = []
    for role, own in by_role.items():
        instructions = [model.instruction_of(role, one.instruction) for one in own]
        given = instructions if any(instructions) else None
        tokens += model.tokenizer([one.text for one in own], role, given)
    return tokens


def _runs(model: TransformerModel, name: str, texts: Sequence[CalibrationText]) -> list[Run]:
    """Return the forward passes of a part of the model: over all texts, or over documents only for
    CDE's context encoder.
    """
    context: tuple[Tensor, ...] = ()
    if model.uses_context:
        documents = [text.text for text in texts if text.role == "document"]
        documents = documents or [text.text for text in texts]
        if name != "backbone":
            read = model.tokenizer(documents, "document", None)
            return [partial(model.embed_context, batch) for batch in equal_batches(model, read)]
        of_corpus = corpus_context(model, documents)
        assert of_corpus is not None
        context = (of_corpus,)
    batches = equal_batches(model, tokens_of(model, texts))
    return [partial(model, batch, *context) for batch in batches]


class _Call:
    """Recorded arguments of one layer in one forward pass: hidden states and all other
    arguments.
    """

    def __init__(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self.by_place = bool(given)
        self.states: Any = given[0] if given else named["hidden_states"]
        self.given = given[1:]
        self.named = {key: value for key, value in named.items() if key != "hidden_states"}

    def run(self, layer: nn.Module, states: Tensor) -> Tensor:
        """Call the layer with other hidden states and the recorded further arguments; return its
        hidden states.
        """
        if self.by_place:
            made = layer(states, *self.given, **self.named)
        else:
            made = layer(hidden_states=states, **self.named)
        output: Tensor = made[0] if isinstance(made, tuple) else made
        return output


def _solve_part(
    name: str,
    layers: Sequence[nn.Module],
    inside: Sequence[Sequence[Matrix]],
    runs: Sequence[Run],
    solver: Solver,
) -> None:
    calls: list[list[_Call]] = []
    states: list[Tensor] = []
    for run in runs:
        found = _calls(layers, run)
        if len(found) != len(layers):
            raise ConfigError(
                f"{name}: each layer must be called once, but its {len(layers)} layers are called "
                f"{len(found)} times; use a method without calibration texts, such as int8"
            )
        if not calls:
            _check_chain(name, layers, found)
        states.append(found[0].states)
        for call in found:
            call.states = None
        calls.append(found)
    for place, (layer, own) in enumerate(zip(layers, inside, strict=True)):
        if own:
            with _watching(own, solver) as statistics:
                for of_pass, given in zip(calls, states, strict=True):
                    of_pass[place].run(layer, given)
            _solve(own, statistics, solver)
        for number, of_pass in enumerate(calls):
            states[number] = of_pass[place].run(layer, states[number])
        logger.info("%s: layer %d of %d compressed", name, place + 1, len(layers))


def _calls(layers: Sequence[nn.Module], run: Run) -> list[_Call]:
    """Run one forward pass and record the arguments of all layers."""
    calls: list[_Call] = []

    def note(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.append(_Call(given, named))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(note, with_kwargs=True).remove)
        run()
    return calls


def _check_chain(name: str, layers: Sequence[nn.Module], calls: Sequence[_Call]) -> None:
    """Check that each layer reads the output of the layer before it."""
    for place, (call, after) in enumerate(pairwise(calls)):
        made, met = call.run(layers[place], call.states), after.states
        apart = made.shape != met.shape or (made - met).norm() > _CHAIN_TOLERANCE * met.norm()
        if bool(apart):
            raise ConfigError(
                f"layer {place + 2} of the {name} does not read the output of layer {place + 1}, "
                "so layers cannot be solved one after the other; use a method without "
                "calibration texts, such as int8"
            )


@contextmanager
def _watching(
    matrices: Sequence[Matrix], solver: Solver
) -> Iterator[dict[tuple[str, int], Statistic]]:
    """Context manager that adds the matrices' inputs to their statistics during forward passes."""
    statistics = {
        (matrix.name, place): solver.begin(weight)
        for matrix in matrices
        for place, weight in enumerate(matrix.slices)
    }
    by_module: dict[nn.Module, dict[str, str]] = defaultdict(dict)
    for matrix in matrices:
        by_module[matrix.module][matrix.attribute] = matrix.name

    def count(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        names = by_module[module]
        for attribute, place, rows in inputs_of(module, given, named):
            if attribute in names and len(rows):
                statistics[names[attribute], place].add(rows)

    with ExitStack() as hooks:
        for module in by_module:
            hooks.callback(module.register_forward_pre_hook(count, with_kwargs=True).remove)
        yield statistics


def _solve(
    matrices: Sequence[Matrix], statistics: Mapping[tuple[str, int], Any], solver: Solver
) -> None:
    for matrix in matrices:
        for place, weight in enumerate(matrix.slices):
            name, statistic = matrix.slice_name(place), statistics[matrix.name, place]
            if statistic.rows == 0:
                # All inputs alike: the matrix is judged by its weights alone.
                logger.warning(
                    "no calibration text reached the matrix %s, so it is compressed by its weights "
                    "alone",
                    name,
                )
                statistic.add(torch.eye(weight.shape[1], device=weight.device))
            solver.solve(weight, statistic, name)
            if not bool(weight.isfinite().all()):
                raise ArtifactError(f"compressing {name} gave weights that are not finite")


def _warn_of_saved(saved: Dtype, device: str, work: str) -> None:
    """Warn once in a process that the device only emulates the bfloat16 in which the weights were
    saved.

    Args:
        work: as the subject of a sentence.
    """
    if saved == "bfloat16" and (precision := auto_precision(device)).dtype != saved:
        say_once(
            logging.WARNING,
            f"{work} computes in {saved}, in which the model is saved, but {precision.why}; on a "
            "machine with units for it that is faster",
        )
