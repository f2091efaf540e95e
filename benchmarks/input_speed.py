"""What a training step's input costs: tokens per second of one thread that makes steps.

Reads a plan's rows, tokenises them and makes a step's arrays, as a data process or a worker's own
thread does, then cuts and collates it, as the worker's thread ahead of training does. The reading
alone is what a plan of token ids instead of texts would still have to do. Times are of one thread.

The second table is the feed of a training whose step costs nothing: tokens per second that arrive
from a thread (0) and from processes, and tokens per CPU second of all that work for it, which
depends least on what else the machine does. It counts after the first step of each process.
Run: python benchmarks/input_speed.py
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from train_speed import make_run, pairs


def median_seconds(function, rounds):
    """Median seconds of a call, and what it gives."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        made = function()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), made


def cpu_seconds():
    """CPU seconds of this process and of its children, those that have ended among them."""
    import psutil

    own = psutil.Process()
    ended = own.cpu_times()
    seconds = ended.user + ended.system + ended.children_user + ended.children_system
    for child in own.children():
        times = child.cpu_times()
        seconds += times.user + times.system
    return seconds


def feed(make, processes, steps):
    """Tokens per second, and per CPU second, of batches that are taken as soon as they are made."""
    from rayembed.data.plan.stream import prefetched

    warm, tokens = max(processes, 1) * 2, 0
    for number, batch in enumerate(prefetched(make, 0, warm + steps, processes), start=1):
        if number > warm:
            tokens += sum(len(text["input_ids"]) for text in batch.tokens)
        if number == warm:
            began, spent = time.perf_counter(), cpu_seconds()
        if number == warm + steps:
            seconds, spent = time.perf_counter() - began, cpu_seconds() - spent
    return tokens / seconds, tokens / spent


def row(count, rounds, processes, steps):
    """A line of each table."""
    from rayembed.assets.resolver import resolve_model
    from rayembed.data.engine.parts import write_part
    from rayembed.data.plan.order import PlanConfig
    from rayembed.data.plan.stream import TRAINING, PairSteps
    from rayembed.data.plan.write import write_plan
    from rayembed.data.records import Record
    from rayembed.machine.hardware import micro_batch_tokens, pass_cost_tokens
    from rayembed.models.loading.build import build_model
    from rayembed.recipes.sample import MINILM
    from rayembed.training.contrastive.collated import collated_step
    from rayembed.training.objective import StepSettings

    run = make_run(Path("/nowhere"), count, 1)
    stage, device = run.stages[0], torch.device("cpu")
    model = build_model(run.model, resolve_model(MINILM), seed=0)
    cost = pass_cost_tokens("cuda", model)
    settings = StepSettings(micro_batch_tokens("cuda"), True, device, pass_cost_tokens=cost)
    records = [Record(str(i), q, (d,), "pairs") for i, (q, d) in enumerate(pairs(count))]
    with tempfile.TemporaryDirectory() as folder:
        parts = {"pairs": [write_part(f"{folder}/parts", records)]}
        config = PlanConfig({"pairs": 1.0}, count, 0, steps + 2 * max(1, *processes), 0, True)
        plan = write_plan(f"{folder}/plan", parts, config)
        make = PairSteps(plan, model.tokenizer)
        read, _ = median_seconds(lambda: plan.read(0, 0, 1, TRAINING), rounds)
        made, batch = median_seconds(lambda: make(0), rounds)
        cut, _ = median_seconds(lambda: collated_step(model, batch, stage, settings), rounds)
        fed = [feed(make, number, steps) for number in processes]
    tokens = sum(len(text["input_ids"]) for text in batch.tokens)
    line = (
        f"| {count:,} | {tokens:,} | {1000 * read:.0f} ms | {1000 * made:.0f} ms "
        f"| {tokens / made:,.0f} | {1000 * cut:.0f} ms | {tokens / cut:,.0f} |"
    )
    told = [f"{a:,.0f} ({b:,.0f})" for a, b in fed]
    return line, " | ".join(["", f"{count:,}", *told, ""]).strip()


def main():
    from rayembed.registry.provenance import cpu_summary

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in a process
    torch.set_num_threads(1)
    rows = [row(count, args.rounds, args.processes, args.steps) for count in args.pairs]
    print(f"{cpu_summary()}\n")
    print("| pairs | tokens | read | read, tokenise, make | tokens/s | cut, collate | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    print(*(line for line, _ in rows), sep="\n")
    print("\nTokens/s (per CPU second) that arrive, by processes")
    print("| pairs |", *(f"{number} |" for number in args.processes))
    print("|" + "---|" * (1 + len(args.processes)))
    print(*(line for _, line in rows), sep="\n")


if __name__ == "__main__":
    main()
