"""Roofline of a training step: what share of a GPU's peak the code can reach, and what the rest is.

NV-Embed on Mistral-7B with LoRA and latent attention, 128 pairs with seven negatives a step, on 8
and 32 H100. The model is rayembed's own on torch's meta device; its operations, bytes and kernels
are counted, not estimated. How long they take is assumed (`counting.Machine`), and so are the
lengths of texts (`lengths`). Each row of the table adds an improvement to those above it.

It is no measurement; where a GPU is at hand `training.py` gives one.
Run: python -m benchmarks.gpu.roofline [--toy]
"""

import argparse
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from benchmarks.gpu.counting import Counts, Machine, PassCosts
from benchmarks.gpu.lengths import (
    BLEND,
    Kind,
    dealt_by_length,
    dealt_by_place,
    greedy_cut,
    rows_of_lengths,
)
from benchmarks.gpu.measuring import print_table

from rayembed.pipeline.requirements import Activations

ROWS = 128
GPU_BYTES = 80e9
SPARE_BYTES = 2e9
"""What CUDA and NCCL hold before a step."""
COMPILED_KEEPS = 0.824
"""Share of what a layer keeps for the backward pass that it keeps compiled, counted on a CPU by
`compiled_layer`: norms' inputs in bfloat16 and not in float32, and no activated gate."""


@dataclass(frozen=True)
class Workload:
    """A model to train, on the meta device, and its step."""

    model: object
    """Settings of the model."""
    layers: int
    budget: int
    """Padded tokens of a micro-batch."""
    kinds: tuple[Kind, ...] = BLEND


@dataclass(frozen=True)
class Setup:
    """How a step is run."""

    by_cost: bool = False
    """Micro-batches are cut at the least cost, not at the budget alone."""
    dealt: bool = False
    """Rows are dealt to workers by length."""
    one_graph: bool = False
    """Graphs of all micro-batches are kept, where they fit, in place of GradCache."""
    packed: bool = False
    """Attention without padding, and with it everything else."""
    merged: bool = False
    """LoRA is part of the weights in passes without gradient."""
    fused: bool = False
    """Element-wise work between two products is one kernel."""
    one_reduction: bool = False
    """Gradients are reduced once a step, not once a micro-batch."""
    latents_by_products: bool = False
    """Attention over latents by plain products, for which no fused kernel has room."""
    keeps_layers: bool = False
    """Layers are recomputed only as far as memory asks for it."""


IMPROVEMENTS: tuple[tuple[str, dict[str, bool], str], ...] = (
    ("greedy cut, GradCache, recompute, padded, eager", {}, "it was"),
    ("cut by cost", {"by_cost": True}, "yes"),
    ("rows dealt by length", {"dealt": True}, "yes"),
    ("one reduction a step", {"one_reduction": True}, "yes"),
    ("one graph where it fits", {"one_graph": True}, "yes"),
    ("unpadded attention", {"packed": True}, "yes"),
    ("latent attention by products", {"latents_by_products": True}, "yes"),
    ("layers recomputed only where memory asks for it", {"keeps_layers": True}, "yes"),
    ("element-wise work fused", {"fused": True}, "by a setting"),
    ("LoRA merged without gradient", {"merged": True}, "no"),
)
"""Each improvement, what it changes, and whether the code has it."""


_FIGURES = ("padding", "passes", "slowest", "done", "done_of_text", "share", "share_alone")


@dataclass(frozen=True)
class Step:
    """Seconds of a step by what they go to, of the slowest worker, and figures about it."""

    seconds: dict[str, float]
    padding: float
    """Padded over real tokens."""
    passes: float
    slowest: float
    """Seconds of the slowest worker over the mean."""
    done: float
    """Operations of products over tokens that pass, padding among them."""
    done_of_text: float
    """The same over tokens of texts alone."""
    share: float
    """Useful operations over what the data sheet's peak would do in the step's time."""
    share_alone: float
    """The same of a worker that waits for no other and sends nothing."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())


class Roofline:
    """Counts of a workload's passes, made once, and steps from them."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        from rayembed.hardware import pass_cost_tokens
        from rayembed.pipeline.meta_pass import model_on_meta

        self.workload, self.machine = workload, machine
        self.costs: dict[tuple[str, bool], PassCosts] = {}
        model = model_on_meta(workload.model)
        self.trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.held = sum(p.numel() * p.element_size() for p in model.parameters())
        self.pass_cost = pass_cost_tokens("cuda", model)
        self.graphs = {packed: graph_of_token(workload, packed) for packed in (False, True)}
        once = self.costs_of("kept", padded=False)
        # The operations of a long text less those of a short one: without what a pass has once.
        self.useful = (once.of([1024]).product_flops - once.of([512]).product_flops) / 512

    def graph(self, setup: Setup) -> Activations:
        """Bytes of a token's graph."""
        found = self.graphs[setup.packed]
        if not setup.fused:
            return found
        less = (1 - COMPILED_KEEPS) * found.of_layer
        whole = found.kept - self.workload.layers * less
        return replace(found, kept=whole, of_layer=found.of_layer - less)

    def costs_of(self, kind: str, *, padded: bool) -> PassCosts:
        """Costs of a pass: `plain` and `merged` without gradient, `recomputed`, `kept`."""
        if (kind, padded) not in self.costs:
            build = partial(_build, self.workload.model, kind)
            gradient = kind in ("recomputed", "kept")
            self.costs[kind, padded] = PassCosts(
                build, self.workload.layers, self.machine, gradient=gradient, padded=padded
            )
        return self.costs[kind, padded]

    def step(self, setup: Setup, workers: int, seeds: int = 6) -> Step:
        """A step's time, in the mean over several batches."""
        steps = [self._step(setup, workers, seed) for seed in range(seeds)]
        names = steps[0].seconds
        return Step(
            {name: float(np.mean([one.seconds[name] for one in steps])) for name in names},
            *(float(np.mean([getattr(one, name) for one in steps])) for name in _FIGURES),
        )

    def _step(self, setup: Setup, workers: int, seed: int) -> Step:
        rows = rows_of_lengths(self.workload.kinds, ROWS, seed)
        deal = dealt_by_length if setup.dealt else dealt_by_place
        of_workers = [part.ravel() for part in deal(rows, workers)]
        cuts = [self._cut(setup, lengths) for lengths in of_workers]
        passes = max(map(len, cuts))
        # Those with fewer micro-batches repeat their shortest text.
        cuts = [cut + [cut[-1][-1:]] * (passes - len(cut)) for cut in cuts]
        found = [self._counts(setup, cut, workers) for cut in cuts]
        of_each = [
            self._seconds(setup, counts, sum(map(sum, cut)))
            for counts, cut in zip(found, cuts, strict=True)
        ]
        totals = [sum(seconds.values()) for seconds in of_each]
        mean = float(np.mean(totals))
        seconds = {name: float(np.mean([one[name] for one in of_each])) for name in of_each[0]}
        seconds["waiting for the slowest"] = max(totals) - mean
        seconds["collectives"] = self._collectives(1 if setup.one_reduction else passes, workers)
        real = int(rows.sum())
        passing = sum(sum(map(sum, _shapes(setup, cut))) for cut in cuts)
        done = sum(one.product_flops for counts in found for one in counts)
        whole = self.useful * real / (workers * self.machine.peak)
        return Step(
            seconds,
            passing / real,
            passes,
            max(totals) / mean,
            done / passing,
            done / real,
            whole / sum(seconds.values()),
            whole / mean,
        )

    def _cut(self, setup: Setup, lengths: np.ndarray) -> list[list[int]]:
        """Lengths of the texts in each micro-batch."""
        from rayembed.models.micro_batches import cut_by_length

        budget = self.workload.budget
        if setup.by_cost:
            texts = lengths.tolist()
            cut = cut_by_length(texts, budget, self.pass_cost, packed=setup.packed)
        else:
            cut = greedy_cut(lengths, budget)
        return [lengths[places].tolist() for places in cut]

    def _counts(self, setup: Setup, cut: list[list[int]], workers: int) -> list[Counts]:
        """Counts of a worker's passes."""
        shapes = _shapes(setup, cut)
        tokens = sum(map(sum, shapes))
        graph = self.graph(setup)
        of_token = self._room(workers, graph) / tokens
        one_graph = len(cut) == 1 or (setup.one_graph and graph.kept_recomputing <= of_token)
        found: list[Counts] = []
        for shape in shapes:
            recomputed = self.costs_of("recomputed", padded=not setup.packed).of(shape)
            if setup.keeps_layers and one_graph:
                kept = self.costs_of("kept", padded=not setup.packed).of(shape)
                spread = graph.kept - graph.kept_recomputing
                share = float(np.clip((of_token - graph.kept_recomputing) / spread, 0, 1))
                # Training recomputes whole layers.
                share = int(share * self.workload.layers) / self.workload.layers
                mixed = share * kept.vector() + (1 - share) * recomputed.vector()
                recomputed = Counts.of(mixed)
            found.append(recomputed)
            if not one_graph:
                kind = "merged" if setup.merged else "plain"
                found.append(self.costs_of(kind, padded=not setup.packed).of(shape))
        return found

    def _seconds(self, setup: Setup, found: list[Counts], texts_tokens: int) -> dict[str, float]:
        """Seconds of a worker's passes by what they go to."""
        machine = self.machine
        whole = Counts.of(sum(one.vector() for one in found))
        useful = self.useful * texts_tokens / machine.products
        rates = np.array(machine.attention if setup.packed else machine.masked_attention)
        latents = whole.latent_flops / np.array(machine.masked_attention)
        products = whole.product_seconds
        if setup.latents_by_products:
            latents = whole.latent_flops / machine.products
        seconds = {
            "products that count": useful,
            "further products": products - useful,
            "element-wise": (whole.fused_bytes if setup.fused else whole.bytes) / machine.memory,
            "attention": float((whole.attention_flops / rates).sum() + latents.sum()),
        }
        launches = whole.kernels * machine.kernel_seconds
        seconds["launches not hidden"] = max(0.0, launches - sum(seconds.values()))
        # Gradients of a micro-batch are added in float32: read in bfloat16, read, written.
        graphs = sum(one.attention_flops[1] > 0 for one in found)
        seconds["adding gradients"] = graphs * self.trained * 10 / machine.memory
        return seconds

    def _room(self, workers: int, graph: Activations) -> float:
        """Bytes of a GPU that ZeRO-2 leaves for graphs, beside a layer that is recomputed; of what
        is left training gives them a share.
        """
        from rayembed.training.graph_room import _SHARES

        gradients = self.trained * (4 + 4 + 12 / workers)  # float32, a bucket, states
        layer = self.workload.budget * graph.of_layer
        left = GPU_BYTES - SPARE_BYTES - self.held - gradients
        return _SHARES["cuda"] * left - layer

    def _collectives(self, reductions: int, workers: int) -> float:
        """Seconds of reducing gradients in float32 and gathering new weights in bfloat16."""
        machine = self.machine
        speed = machine.in_node if workers <= machine.gpus_of_node else machine.between_nodes
        amount = self.trained * (reductions * 2 * 4 + 2)
        return amount * (workers - 1) / workers / speed


def _shapes(setup: Setup, cut: list[list[int]]) -> list[list[int]]:
    """Lengths in each micro-batch as they pass: padded to the longest, or as they are."""
    return cut if setup.packed else [[max(micro)] * len(micro) for micro in cut]


def graph_of_token(workload: Workload, packed: bool) -> Activations:
    """Bytes of a token's graph, as the layers come."""
    from rayembed.pipeline.activations import activations

    found = activations(workload.model, padded=not packed)
    assert found is not None
    return found


def _build(settings, kind: str, layers: int):
    """The model on the meta device with this number of layers."""
    from rayembed.config.settings import changed
    from rayembed.pipeline.meta_pass import model_on_meta

    backbone = changed(settings.backbone, num_layers=layers)
    without = {"lora": None} if kind == "merged" else {}
    model = model_on_meta(changed(settings, backbone=backbone, **without))
    if kind == "recomputed":
        model.recompute()
    return model


def nvembed() -> Workload:
    """The recipe's model and micro-batches."""
    from rayembed.recipes.nvembed import nvembed_v2_public

    run = nvembed_v2_public()
    return Workload(run.model, 32, run.placement.micro_batch_tokens)


def toy() -> Workload:
    """The quickstart's model, with two layers and as if they were four."""
    from rayembed.config.settings import changed
    from rayembed.recipes.nvembed import quickstart

    model = quickstart().model
    backbone = changed(model.backbone, num_layers=4, dtype="bfloat16")
    return Workload(changed(model, backbone=backbone), 4, 4096)


def table(
    roofline: Roofline, gpus: tuple[int, ...], seeds: int = 6
) -> list[tuple[str, list[Step]]]:
    """Each improvement, with those before it, and its step on each number of GPUs."""
    setup, rows = Setup(), []
    for name, change, _ in IMPROVEMENTS:
        setup = replace(setup, **change)
        rows.append((name, [roofline.step(setup, number, seeds) for number in gpus]))
    return rows


def main(arguments: list[str] | None = None) -> list[tuple[str, list[Step]]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--toy", action="store_true", help="a small model")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 32])
    options = parser.parse_args(arguments)
    machine = Machine()
    roofline = Roofline(toy() if options.toy else nvembed(), machine)
    setups = Setup(), Setup(packed=True), Setup(packed=True, fused=True)
    padded, packed, compiled = map(roofline.graph, setups)
    print(
        f"Assumed: products {machine.products / 1e12:.0f} TFLOP/s of {machine.peak / 1e12:.0f}, "
        f"memory {machine.memory / 1e12:.1f} TB/s. Counted: {roofline.useful / 1e9:.1f} GFLOP a "
        f"token that count; {padded.kept / 1e6:.1f} MB a token for the backward pass, "
        f"{packed.kept / 1e6:.1f} without padding, {compiled.kept / 1e6:.1f} with compiled layers, "
        f"{compiled.kept_recomputing / 1e6:.2f} with layers recomputed.\n"
    )
    rows = table(roofline, tuple(options.gpus))
    columns = (
        *("share of peak", "alone", "step, s", "padding", "passes", "slowest/mean"),
        "GFLOP done a token in a pass and of text",
    )
    heads = [f"{n} GPUs: {columns[0]}, {', '.join(columns[1:])}" for n in options.gpus]
    lines = []
    for (name, steps), (_, _, there) in zip(rows, IMPROVEMENTS, strict=True):
        cells = [
            f"{one.share:.1%}, {one.share_alone:.1%}, {one.total:.2f}, {one.padding:.2f}, "
            f"{one.passes:.1f}, {one.slowest:.2f}, "
            f"{one.done / 1e9:.1f}, {one.done_of_text / 1e9:.1f}"
            for one in steps
        ]
        lines.append([name, there, *cells])
    print_table(["with all above", "in the code", *heads], lines)
    shown = [(name, place) for name in (0, len(rows) - 1) for place in range(len(options.gpus))]
    print("\nWhere the time goes, in shares of the step:\n")
    ends = [f"{('as it was', 'last row')[r > 0]}, {options.gpus[g]} GPUs" for r, g in shown]
    steps = [rows[r][1][g] for r, g in shown]
    parts = [
        [part, *(f"{one.seconds[part] / one.total:.0%}" for one in steps)]
        for part in steps[0].seconds
    ]
    print_table(["of", *ends], parts)
    return rows


if __name__ == "__main__":
    main()
