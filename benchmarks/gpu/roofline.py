"""Roofline of a training step: what share of a GPU's peak the code can reach, and what the rest is.

By default NV-Embed on Mistral-7B with LoRA and latent attention, 128 pairs with seven negatives a
step, on 8 and 32 H100. The model is rayembed's own on torch's meta device; its operations, bytes
and kernels are counted, not estimated. How long they take is assumed (`counting.Machine`), and so
are the lengths of texts (`lengths`). Each row of the table adds an improvement to those above it.

It is no measurement; where a GPU is at hand `training.py` gives one, and `predicted` what to
expect of it.
Run: python -m benchmarks.gpu.roofline [--toy]
"""

import argparse
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from benchmarks.gpu.counting import Counts, Machine, PassCosts
from benchmarks.gpu.lengths import dealt_by_length, rows_of_lengths
from benchmarks.gpu.measuring import print_table
from benchmarks.gpu.workloads import (
    Graph,
    Workload,
    build,
    graph_of_token,
    nvembed,
    of_training,
    toy,
)

SPARE_BYTES = 2e9
"""What CUDA and NCCL hold before a step."""
COMPILED_KEEPS, COMPILED_PRODUCTS = 0.6449, 0.9227
"""Shares of what a layer keeps for the backward pass, whole and of products alone, that it keeps
compiled, counted on a CPU by `compiled_layer`."""
H100 = Machine()
H200 = Machine(memory=4.0e12, gpu_bytes=141e9)


@dataclass(frozen=True)
class Setup:
    """How a step is run."""

    peft: bool = False
    """Adapters by peft's own layer."""
    compiled: bool = True
    """Element-wise work between two products is one kernel."""
    keeps_products: bool = True
    """Layers keep their products where all of a layer has no room, before they keep nothing."""
    overlapped: float = 0.0
    """Share of the reduction that runs beside the backward pass."""


IMPROVEMENTS: tuple[tuple[str, dict[str, bool | float], str], ...] = (
    ("peft's adapters, eager, layers kept or recomputed whole", {}, "it was"),
    ("adapters in one operation, dropout by bits", {"peft": False}, "yes"),
    ("element-wise work fused", {"compiled": True}, "yes"),
    ("products kept, the rest recomputed", {"keeps_products": True}, "yes"),
    ("reduction beside the backward pass, 95 % of it", {"overlapped": 0.95}, "no"),
)
"""Each improvement, what it changes, and whether the code has it."""
BEFORE = Setup(peft=True, compiled=False, keeps_products=False)

_FIGURES = ("passes", "slowest", "done", "kept", "products", "share", "share_alone")


@dataclass(frozen=True)
class Step:
    """Seconds of a step by what they go to, of the slowest worker, and figures about it."""

    seconds: dict[str, float]
    passes: float
    slowest: float
    """Seconds of the slowest worker over the mean."""
    done: float
    """Operations of products a token of text."""
    kept: float
    """Layers that are kept whole, in the mean of workers."""
    products: float
    """Layers of which products are kept."""
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
        from rayembed.machine.hardware import pass_cost_tokens
        from rayembed_extras.estimates.model_sizes import model_on_meta

        self.workload, self.machine = workload, machine
        self.costs: dict[tuple[str, bool], PassCosts] = {}
        model = model_on_meta(workload.model)
        self.trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.held = sum(p.numel() * p.element_size() for p in model.parameters())
        self.pass_cost = pass_cost_tokens("cuda", model)
        self.graphs: dict[tuple[bool, bool], Graph] = {}
        once = self.costs_of("kept")
        # The operations of a long text less those of a short one: without what a pass has once.
        self.useful = (once.of([1024]).product_flops - once.of([512]).product_flops) / 512

    def graph(self, setup: Setup) -> Graph:
        """Bytes of a token's graph."""
        key = (setup.peft, setup.compiled)
        if key not in self.graphs:
            found = graph_of_token(self.workload, peft=setup.peft)
            if setup.compiled:
                less = (1 - COMPILED_KEEPS) * found.layer
                whole = found.whole - self.workload.layers * less
                products = COMPILED_PRODUCTS * found.products
                found = replace(found, whole=whole, layer=found.layer - less, products=products)
            self.graphs[key] = found
        return self.graphs[key]

    def costs_of(self, kind: str, *, padded: bool = False) -> PassCosts:
        """Costs of a pass: `plain` without gradient, `recomputed`, `products`, `kept`; with `peft `
        before it by peft's adapters.
        """
        if (kind, padded) not in self.costs:
            made = partial(build, self.workload.model, kind)
            gradient = "plain" not in kind
            self.costs[kind, padded] = PassCosts(
                made, self.workload.layers, self.machine, gradient=gradient, padded=padded
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
        workload = self.workload
        rows = rows_of_lengths(workload.kinds, workload.rows, seed)[:, : workload.texts]
        cuts = [self._cut(part.ravel()) for part in dealt_by_length(rows, workers)]
        passes = max(map(len, cuts))
        # Those with fewer micro-batches repeat their shortest text.
        cuts = [cut + [cut[-1][-1:]] * (passes - len(cut)) for cut in cuts]
        ways = [self._way(setup, cut, workers) for cut in cuts]
        found = [self._counts(setup, *one) for one in zip(cuts, ways, strict=True)]
        of_each = [
            self._seconds(setup, counts, sum(map(sum, cut)), len(cut), workers)
            for counts, cut in zip(found, cuts, strict=True)
        ]
        totals = [sum(seconds.values()) for seconds in of_each]
        mean = float(np.mean(totals))
        seconds = {name: float(np.mean([one[name] for one in of_each])) for name in of_each[0]}
        seconds["waiting for the slowest"] = max(totals) - mean
        seconds["collectives"] = self._collectives(setup, workers)
        real = int(rows.sum())
        whole = self.useful * real / (workers * self.machine.peak)
        return Step(
            seconds,
            passes,
            max(totals) / mean,
            sum(one.product_flops for counts in found for one in counts) / real,
            float(np.mean([kept for _, kept, _ in ways])),
            float(np.mean([products for *_, products in ways])),
            whole / sum(seconds.values()),
            whole / mean,
        )

    def _cut(self, lengths: np.ndarray) -> list[list[int]]:
        """Lengths of the texts in each micro-batch."""
        from rayembed.models.passes.micro_batches import cut_by_length

        cut = cut_by_length(lengths.tolist(), self.workload.budget, self.pass_cost, packed=True)
        return [lengths[places].tolist() for places in cut]

    def _way(self, setup: Setup, cut: list[list[int]], workers: int) -> tuple[bool, int, int]:
        """Whether the graphs of all passes are kept, layers kept whole, and those of which products
        are.
        """
        layers, graph = self.workload.layers, self.graph(setup)
        tokens, of_pass = sum(map(sum, cut)), max(map(sum, cut))
        room = self._room(workers)
        for graphs in (True, False):
            held = tokens if graphs else of_pass
            ladder = [(layers, 0)]
            if setup.keeps_products:
                ladder += [(layers - n, n) for n in range(1, layers + 1)]
                ladder += [(0, layers - n) for n in range(1, layers + 1)]
            else:
                ladder += [(layers - n, 0) for n in range(1, layers + 1)]
            for kept, products in ladder:
                bare = layers - kept - products
                less = bare * (graph.layer - graph.input)
                less += products * (graph.layer - graph.products)
                again = graph.layer - (graph.input if bare else graph.products)
                again *= kept < layers
                if held * (graph.whole - less) + of_pass * again <= room:
                    return graphs, kept, products
        return False, 0, 0

    def _counts(
        self, setup: Setup, cut: list[list[int]], way: tuple[bool, int, int]
    ) -> list[Counts]:
        """Counts of a worker's passes."""
        graphs, kept, products = way
        layers = self.workload.layers
        parts = {"kept": kept, "products": products, "recomputed": layers - kept - products}
        before = "peft " if setup.peft else ""
        found: list[Counts] = []
        for texts in cut:
            shares = [
                self.costs_of(before + kind).of(texts).vector() * number / layers
                for kind, number in parts.items()
                if number
            ]
            found.append(Counts.of(sum(shares)))
            if not graphs and len(cut) > 1:
                found.append(self.costs_of(before + "plain").of(texts))
        return found

    def _seconds(
        self, setup: Setup, found: list[Counts], tokens: int, passes: int, workers: int
    ) -> dict[str, float]:
        """Seconds of a worker's passes and update by what they go to."""
        machine = self.machine
        whole = Counts.of(sum(one.vector() for one in found))
        useful = self.useful * tokens / machine.products
        attention = (whole.attention_flops / np.array(machine.attention)).sum()
        moved = whole.fused_bytes if setup.compiled else whole.bytes
        seconds = {
            "products that count": useful,
            "further products": whole.product_seconds - useful,
            "element-wise": moved / machine.memory,
            "drawing dropout's bits": whole.decisions * machine.decision,
            "attention": float(attention + whole.latent_flops.sum() / machine.products),
        }
        launches = sum(self._launches(setup, one) for one in found)
        seconds["launches not hidden"] = max(0.0, launches - sum(seconds.values()))
        # Gradients of a micro-batch are added in float32 (read in bfloat16, read, written), and
        # AdamW reads four numbers a weight and writes three and a bfloat16.
        moved = passes * 10 + (4 * 4 + 3 * 4 + 2) / workers
        seconds["gradients and weights"] = self.trained * moved / machine.memory
        return seconds

    def _launches(self, setup: Setup, counts: Counts) -> float:
        """Seconds in which the host launches a pass's kernels."""
        plain = self.costs_of("peft plain" if setup.peft else "plain").of([128])
        both = (counts.fused_kernels, plain.fused_kernels)
        kernels, first = both if setup.compiled else (counts.kernels, plain.kernels)
        forward, backward = self.machine.kernel_seconds
        return min(kernels, first) * forward + max(0.0, kernels - first) * backward

    def _room(self, workers: int) -> float:
        """Bytes of a GPU that training gives to graphs of what ZeRO-2 leaves."""
        from rayembed.training.memory.graph_room import _SHARES

        gradients = self.trained * (4 + 4 + 12 / workers)  # float32, a bucket, states
        left = self.machine.gpu_bytes - SPARE_BYTES - self.held - gradients
        return _SHARES["cuda"] * left

    def _collectives(self, setup: Setup, workers: int) -> float:
        """Seconds of reducing gradients in float32, as far as they are waited for, and of gathering
        new weights in bfloat16.
        """
        machine = self.machine
        speed = machine.in_node if workers <= machine.gpus_of_node else machine.between_nodes
        amount = self.trained * ((1 - setup.overlapped) * 2 * 4 + 2)
        return amount * (workers - 1) / workers / speed


@dataclass(frozen=True)
class Prediction:
    """What a step should take."""

    seconds: float
    tokens_per_second: float
    """Of all GPUs."""
    share: float
    """Of the data sheet's peak."""
    flops: float
    """Useful operations a second of one GPU."""
    step: Step


SIDES = {"auto": Setup(compiled=False, keeps_products=False), "compiled": Setup()}
"""Sides of the benchmark of training that are predicted."""


def predicted(
    model: str, gpus: int, side: str = "compiled", machine: Machine = H100, budget: int = 0
) -> Prediction:
    """Predict a step.

    Args:
        model: `recipe` for NV-Embed's with all its rows on all GPUs, or `bert`, `7b` or `nvembed`
            as `training.py` trains them on one GPU.
        side: a key of `SIDES`.
        budget: tokens of a micro-batch; 0: the case's own.
    """
    roofline = _roofline(model, gpus, machine, budget)
    step = roofline.step(SIDES[side], gpus)
    flops = step.share * machine.peak
    return Prediction(step.total, gpus * flops / roofline.useful, step.share, flops, step)


@lru_cache
def _roofline(model: str, gpus: int, machine: Machine, budget: int) -> Roofline:
    workload = nvembed() if model == "recipe" else of_training(model, gpus)
    return Roofline(replace(workload, budget=budget or workload.budget), machine)


def table(
    roofline: Roofline, gpus: tuple[int, ...], seeds: int = 6
) -> list[tuple[str, list[Step]]]:
    """Each improvement, with those before it, and its step on each number of GPUs."""
    setup, rows = BEFORE, []
    for name, change, _ in IMPROVEMENTS:
        setup = replace(setup, **change)
        rows.append((name, [roofline.step(setup, number, seeds) for number in gpus]))
    return rows


def main(arguments: list[str] | None = None) -> list[tuple[str, list[Step]]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--toy", action="store_true", help="a small model")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 32])
    options = parser.parse_args(arguments)
    machine = H100
    roofline = Roofline(toy() if options.toy else nvembed(), machine)
    before, graph, compiled = map(roofline.graph, (BEFORE, SIDES["auto"], SIDES["compiled"]))
    forward, backward = (1e6 * seconds for seconds in machine.kernel_seconds)
    print(
        f"Assumed: products {machine.products / 1e12:.0f} TFLOP/s of {machine.peak / 1e12:.0f}, "
        f"memory {machine.memory / 1e12:.1f} TB/s, {forward:.0f} us of the host for a kernel of "
        f"the forward and {backward:.0f} of the backward pass, {1e12 * machine.decision:.2f} ps "
        "for a decision of dropout. Counted: "
        f"{roofline.useful / 1e9:.1f} GFLOP a token that count; {before.whole / 1e6:.1f} MB a "
        f"token for the backward pass by peft's adapters, {graph.whole / 1e6:.1f} by rayembed's, "
        f"{compiled.whole / 1e6:.1f} with compiled layers; of a layer {compiled.layer / 1e3:.0f} "
        f"kB, {compiled.products / 1e3:.0f} of products alone, {compiled.input / 1e3:.0f} of one "
        "that is recomputed. Left out: some 5 ms between steps.\n"
    )
    rows = table(roofline, tuple(options.gpus))
    columns = "share of peak, alone, step in s, passes, layers kept, of products, GFLOP a token"
    lines = []
    for (name, steps), (_, _, there) in zip(rows, IMPROVEMENTS, strict=True):
        cells = [
            f"{one.share:.1%}, {one.share_alone:.1%}, {one.total:.2f}, {one.passes:.1f}, "
            f"{one.kept:.0f}, {one.products:.0f}, {one.done / 1e9:.1f}"
            for one in steps
        ]
        lines.append([name, there, *cells])
    heads = [f"{number} GPUs: {columns}" for number in options.gpus]
    print_table(["with all above", "in the code", *heads], lines)
    there = max(place for place, (*_, known) in enumerate(IMPROVEMENTS) if known == "yes")
    shown = [(name, place) for name in (0, there) for place in range(len(options.gpus))]
    print("\nWhere the time goes, in shares of the step:\n")
    ends = [f"{('as it was', 'in the code')[r > 0]}, {options.gpus[g]} GPUs" for r, g in shown]
    steps = [rows[r][1][g] for r, g in shown]
    parts = [
        [part, *(f"{one.seconds[part] / one.total:.0%}" for one in steps)]
        for part in steps[0].seconds
    ]
    print_table(["of", *ends], parts)
    return rows


if __name__ == "__main__":
    main()
