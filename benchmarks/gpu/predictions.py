"""What one GPU should measure, from counts and assumptions; benchmarks print it beside what it is.

Products, bytes and kernels of a pass are counted on torch's meta device (`counting`); how long they
take is assumed, and every assumption is printed. The host launches kernels ahead of the GPU, so a
step takes as long as the longer of the two, or as long as the processes that tokenise. Steps of
rayembed's own sides come from `roofline`, with the same assumptions. Shares are
of what square products in bfloat16 reach, as in `training.py`, not of the data sheet.
`local_run` prints tables of them without a GPU.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from benchmarks.gpu import roofline
from benchmarks.gpu.counting import Counts, Machine, PassCosts
from benchmarks.gpu.lengths import LONGEST, ONLY_RETRIEVAL, rows_of_lengths

MACHINES = {"H100": roofline.H100, "H200": roofline.H200}
"""GPUs by a word of their name."""

SQUARE_PRODUCTS = 784e12
"""FLOP/s of bfloat16 products of 8192³, measured on an H200 (benchmarks/log, 2026-11-28). Shares
are of this number where none is measured."""

SLOW_HOST = (90e-6, 90e-6)
"""`Machine.kernel_seconds` at worst. On that H200's host a forward pass of BERT base took 16 ms of
163 kernels, and of a step of four passes with 484 each, its tokenising within it, 48 ms a pass."""

BETWEEN_STEPS_SECONDS = 5e-3
"""In a job, from a step's last kernel to the next step's first: the optimiser is called, the loss
read and logged. Assumed, not measured."""

THREAD_TOKENS = 130_000
"""Tokens a second that a thread of the worker reads and tokenises, the least that was measured."""

READER_TOKENS, READERS = 250_000, 4
"""The same of a process beside the worker, with other work beside it; a core alone made 400,000 to
450,000. A local run on a GPU has four for a small model, where there are 16 cores."""

JOB_OPTIMISER_BYTES = 44.0
"""For each parameter of a step under DeepSpeed: gradients added in float32 (10) and their norm (4),
AdamW's read and written in float32 (28), weights in bfloat16 (2)."""

COPY_BYTES = 8e9
"""Bytes a second of documents from the host's memory to the GPU, through pinned memory. Assumed."""


class Costs(Protocol):
    """Counts of a pass over texts of these lengths."""

    def of(self, lengths: Sequence[int]) -> Counts: ...


@dataclass(frozen=True)
class Prediction:
    """What a step, or any other piece of work, is expected to take."""

    seconds: float
    tokens: int
    share: float | None = None
    """Of `SQUARE_PRODUCTS`, or of the peak that was measured."""
    gigabytes: float | None = None
    bound: str = ""
    """What takes longest: `GPU`, `launches` or `tokenising`."""
    passes: int = 1

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the work over its seconds."""
        return self.tokens / self.seconds

    def cells(self) -> list[str]:
        """Tokens/s, share and GB for a table."""
        share = "–" if self.share is None else f"{self.share:.0%}"
        memory = "–" if self.gigabytes is None else f"{self.gigabytes:.1f}"
        return [f"{self.tokens_per_second:,.0f}", share, memory]


UNKNOWN = ["–", "–", "–"]
"""Cells where nothing is predicted."""


def gpu_of(name: str) -> str:
    """Key of the assumptions for a GPU by its name: those of an H100 for any other."""
    return next((key for key in MACHINES if key in name), "H100")


@dataclass(frozen=True)
class Size:
    """What a model takes."""

    parameters: int
    trained: int
    graph: float
    """Bytes of a token's graph."""
    graph_recomputing: float
    """The same with all layers recomputed in the backward pass."""
    of_layer: float
    """Of it, one layer's."""
    layers: int


class Model:
    """Counts of a model's passes, and what steps and encoding take by them."""

    def __init__(self, settings: Any, machine: Machine, kept: Path | None = None) -> None:
        """Count nothing yet.

        Args:
            kept: folder that holds counts for later processes.
        """
        self.settings, self.machine, self._kept = settings, machine, kept
        self._made: dict[str, Any] = {}

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """What this process or an earlier one made under this name, else what `make` gives."""
        if name not in self._made:
            lora = "-lora" if self.settings.lora is not None else ""
            self._made[name] = once(self._kept, f"{self.settings.kind}{lora}-{name}", make)
        return self._made[name]

    def costs(self, *, gradient: bool, padded: bool = False, recomputed: bool = False) -> PassCosts:
        """Counts of a pass, forward or with its backward pass."""

        def make() -> PassCosts:
            build = partial(_with_layers, self.settings, recomputed=recomputed)
            layers = self.size.layers
            return PassCosts(build, layers, self.machine, gradient=gradient, padded=padded)

        # Seconds of products depend on the machine.
        name = f"{gradient}-{padded}-{recomputed}-{self.machine.memory:.1e}"
        return self._once(name, make)

    @property
    def size(self) -> Size:
        """What the model takes."""

        def make() -> Size:
            from rayembed_extras.estimates.model_sizes import activations, model_on_meta

            model = model_on_meta(self.settings)
            found = activations(self.settings, padded=False)
            assert found is not None
            return Size(
                sum(p.numel() for p in model.parameters()),
                sum(p.numel() for p in model.parameters() if p.requires_grad),
                found.kept,
                found.kept_recomputing,
                found.of_layer,
                model.num_layers,
            )

        return self._once("size", make)

    def forward_flops(self) -> float:
        """Operations of products a token in a forward pass that count."""
        from rayembed_extras.estimates.requirements import flops_per_token

        return flops_per_token(self.settings) or 0.0

    def training_step(
        self,
        passes: Sequence[Sequence[int]],
        *,
        tokens: int | None = None,
        padded: bool = False,
        compiled: bool = False,
        recomputed: bool = False,
        peak: float = SQUARE_PRODUCTS,
        optimiser_bytes: float = 14.0,
        readers: float | None = None,
        between: float = 0.0,
    ) -> Prediction:
        """A step of these passes, all graphs kept.

        Args:
            passes: lengths of the texts in each pass, padding included.
            tokens: of texts alone, where there is padding.
            recomputed: whether all layers are in the backward pass.
            optimiser_bytes: moved for each trained parameter; 14 are AdamW's in bfloat16 without
                copies in float32.
            readers: tokens a second of the processes that tokenise; None: made ahead.
            between: seconds that neither the GPU nor the launches hide.
        """
        size = self.size
        passing = sum(map(sum, passes))
        costs = self.costs(gradient=True, padded=padded, recomputed=recomputed)
        plain = self.costs(gradient=False, padded=padded)
        gpu, host = seconds_of(
            passes, costs, self.machine, plain=plain, compiled=compiled, masked=padded
        )
        gpu += size.trained * optimiser_bytes / self.machine.memory
        real = passing if tokens is None else tokens
        taken = {"GPU": gpu, "launches": host}
        if readers is not None:
            taken["tokenising"] = real / readers
        bound = max(taken, key=lambda key: taken[key])
        seconds = taken[bound] + between
        # Forward, the gradients of what goes through the layers, and those of trained weights.
        factor = 3 if self.settings.lora is None else 2
        graph = size.graph_recomputing if recomputed else size.graph
        return Prediction(
            seconds,
            real,
            factor * self.forward_flops() * real / seconds / peak,
            # Weights, gradients and two states in bfloat16, and the graphs.
            None if padded else (2 * size.parameters + 6 * size.trained + passing * graph) / 1e9,
            bound,
            len(passes),
        )

    def encoding(self, lengths: Sequence[int], *, peak: float = SQUARE_PRODUCTS) -> Prediction:
        """Forward passes over texts, packed, with tokens made ahead by threads that keep up."""
        from rayembed.models.passes import encoding

        small = self.size.parameters < encoding._SMALL_MODEL
        budget = encoding._GPU_TOKENS_OF_SMALL if small else encoding._GPU_TOKENS
        passes = cut(lengths, budget)
        plain = self.costs(gradient=False)
        gpu, host = seconds_of(passes, plain, self.machine, plain=plain)
        seconds, tokens = max(gpu, host), sum(lengths)
        size = self.size
        return Prediction(
            seconds,
            tokens,
            self.forward_flops() * tokens / seconds / peak,
            (2 * size.parameters + budget * size.of_layer) / 1e9,  # a layer at a time
            "GPU" if gpu >= host else "launches",
            len(passes),
        )


def _with_layers(settings: Any, layers: int, *, recomputed: bool) -> Any:
    """The model on the meta device with this number of layers."""
    from rayembed.config.settings import changed
    from rayembed_extras.estimates.model_sizes import model_on_meta

    backbone = changed(settings.backbone, num_layers=layers)
    model = model_on_meta(changed(settings, backbone=backbone))
    if recomputed:
        model.recompute()
    return model


def once(folder: Path | None, name: str, make: Callable[[], Any]) -> Any:
    """Object that an earlier process left in this folder, or a new one, which is left there."""
    if folder is None:
        return make()
    path = folder / f"counted-{name}.pickle"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(make()))
    return pickle.loads(path.read_bytes())


def of_training(
    model: str, side: str, gpu: str, budget: int, peak: float, kept: Path | None = None
) -> Prediction:
    """A step of one of rayembed's own sides of `training.py`, at its published size.

    Args:
        model: a case of `training.py`.
        side: `auto` or `compiled`.
        budget: tokens of a pass.
    """

    def make() -> Prediction:
        machine, setup = MACHINES[gpu], roofline.SIDES[side]
        found = roofline.predicted(model, 1, side, machine, budget)
        made = roofline._roofline(model, 1, machine, budget)
        graph, step = made.graph(setup), found.step
        bare = made.workload.layers - step.kept - step.products
        a_token = graph.whole - bare * (graph.layer - graph.input)
        a_token -= step.products * (graph.layer - graph.products)
        tokens = found.tokens_per_second * found.seconds
        # Weights, gradients and two states in bfloat16, and the graphs.
        taken = made.held + 6 * made.trained + tokens * a_token
        share = found.flops / SQUARE_PRODUCTS
        return Prediction(found.seconds, round(tokens), share, taken / 1e9, "", round(step.passes))

    found = once(kept, f"step-{model}-{side}-{gpu}-{budget}", make)
    assert found.share is not None
    return replace(found, share=found.share * SQUARE_PRODUCTS / peak)


def seconds_of(
    passes: Sequence[Sequence[int]],
    costs: Costs,
    machine: Machine,
    *,
    plain: Costs,
    compiled: bool = False,
    masked: bool = False,
) -> tuple[float, float]:
    """Seconds of passes on the GPU, and seconds of the host that launches their kernels.

    Args:
        plain: counts of the same passes without gradient.
    """
    whole = Counts.of(np.sum([costs.of(one).vector() for one in passes], axis=0))
    first = Counts.of(np.sum([plain.of(one).vector() for one in passes], axis=0))
    rates = np.array(machine.masked_attention if masked else machine.attention)
    moved = whole.fused_bytes if compiled else whole.bytes
    attention = float((whole.attention_flops / rates).sum())
    gpu = whole.product_seconds + moved / machine.memory + attention
    kernels, before = ((one.fused_kernels if compiled else one.kernels) for one in (whole, first))
    forward, backward = machine.kernel_seconds
    return gpu, before * forward + (kernels - before) * backward


def cut(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Lengths of the texts in each packed pass, cut as training cuts them."""
    from rayembed.models.passes.micro_batches import cut_by_length

    places = cut_by_length(list(lengths), budget, 0, packed=True)
    return [[lengths[place] for place in one] for one in places]


def lengths_of_pairs(pairs: int, longest: int = LONGEST, seed: int = 0) -> list[list[int]]:
    """Lengths of queries and of documents, as in retrieval data."""
    rows = np.minimum(rows_of_lengths(ONLY_RETRIEVAL, pairs, seed)[:, :2], longest)
    return rows.T.tolist()


def of_columns(columns: Sequence[Sequence[int]], *, padded: bool) -> list[list[int]]:
    """Passes of sentence-transformers: one for each column, padded to its longest text or not."""
    return [[max(one)] * len(one) if padded else list(one) for one in columns]


def search_seconds(
    queries: int, documents: int, width: int, number_bytes: int, machine: Machine
) -> float:
    """Seconds of exact top-k with rounded products first.

    Documents are copied to the GPU while products are made; a product in bfloat16 is written once
    and read twice.
    """
    copied = documents * width * number_bytes / COPY_BYTES
    flops = 2.0 * queries * documents * width
    moved = 6.0 * queries * documents
    return max(copied, flops / machine.products + moved / machine.memory)


def assumptions(gpu: str) -> str:
    """The assumptions in a paragraph."""
    machine = MACHINES[gpu]
    return (
        f"Assumed of an {gpu}: products {machine.products / 1e12:.0f} TFLOP/s, memory "
        f"{machine.memory / 1e12:.1f} TB/s, attention {machine.attention[0] / 1e12:.0f} and "
        f"{machine.attention[1] / 1e12:.0f} TFLOP/s forward and backward "
        f"({machine.masked_attention[0] / 1e12:.0f} and {machine.masked_attention[1] / 1e12:.0f} "
        f"with a mask), {1e6 * machine.kernel_seconds[0]:.0f} and "
        f"{1e6 * machine.kernel_seconds[1]:.0f} µs of the host a kernel, forward and backward, "
        f"{1e3 * BETWEEN_STEPS_SECONDS:.0f} ms between steps of a job, {THREAD_TOKENS:,} "
        f"tokens a second of a thread that tokenises and {READER_TOKENS:,} of each of {READERS} "
        f"processes. Shares are of "
        f"{SQUARE_PRODUCTS / 1e12:.0f} TFLOP/s, what square products reached on an H200; "
        f"{machine.peak / 1e12:.0f} are on the data sheet."
    )
