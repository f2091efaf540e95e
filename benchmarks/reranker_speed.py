"""Lists per second of training a reranker: rayembed against sentence-transformers, in one run.

Both sides train all-MiniLM-L6-v2 with a new layer that scores, on the same lists of Wikipedia pairs
(one sentence → the rest of its article, and seven other articles; max length 128), by binary
cross-entropy of each pair, on all cores:

- `peer bf16`, `peer fp32`: CrossEncoderTrainer with BinaryCrossEntropyLoss, bfloat16 by autocast;
- `bare`: our step in a plain loop with torch's AdamW, in the number type that this CPU computes
  fast; no Ray, no DeepSpeed, no plan.

Each side runs in a process of its own, in turn, `--rounds` times; start-up and the first steps are
not counted. Run: python benchmarks/reranker_speed.py
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time

SIDES = ("peer bf16", "peer fp32", "bare")
WARMUP, DOCUMENTS, MAX_LENGTH, MICRO_BATCH_TOKENS = 2, 8, 128, 2048


def lists(count):
    """(query, documents) of each list; the first document is the positive."""
    from rayembed.assets.resolver import resolve
    from rayembed.recipes.sample import Wikipedia

    lines = resolve(Wikipedia(held_out=0).pairs("sentence").path).read_text().splitlines()
    rows = [(row["query"], row["positive"]) for row in map(json.loads, lines)]
    rng = random.Random(0)
    chosen = rng.sample(rows, count)
    return [(q, [d, *(rng.choice(rows)[1] for _ in range(DOCUMENTS - 1))]) for q, d in chosen]


def rate(seconds, batch):
    return batch * len(seconds[WARMUP:]) / sum(seconds[WARMUP:])


def peer(batch, steps, dtype):
    from datasets import Dataset
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import (
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
    from transformers import TrainerCallback

    from rayembed.assets.resolver import resolve_model
    from rayembed.recipes.sample import MINILM

    model = CrossEncoder(str(resolve_model(MINILM)), num_labels=1, max_length=MAX_LENGTH)
    pairs = [(q, d, float(i == 0)) for q, of in lists(batch * steps) for i, d in enumerate(of)]
    columns = zip(("query", "document", "label"), zip(*pairs, strict=True), strict=True)
    data, seconds = Dataset.from_dict({name: list(values) for name, values in columns}), []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_args, **_kwargs):
            self.last = time.perf_counter()

        def on_step_end(self, *_args, **_kwargs):
            now = time.perf_counter()
            seconds.append(now - self.last)
            self.last = now

    with tempfile.TemporaryDirectory() as folder:
        arguments = CrossEncoderTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=batch * DOCUMENTS,
            max_steps=steps,
            learning_rate=2e-5,
            bf16=dtype == "bf16",
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        CrossEncoderTrainer(
            model=model,
            args=arguments,
            train_dataset=data,
            loss=BinaryCrossEntropyLoss(model),
            callbacks=[Clock()],
        ).train()
    return rate(seconds, batch)


def bare(batch, steps):
    import torch

    from rayembed.assets.resolver import resolve_model
    from rayembed.config.override import override
    from rayembed.data.records import Negative, Record
    from rayembed.models.loading.build import build_model
    from rayembed.recipes.catalogue import get_recipe
    from rayembed.recipes.sample import MINILM
    from rayembed.training.contrastive.engine_module import EngineModule
    from rayembed.training.objective import StepSettings
    from rayembed_extras.reranking.objective import LISTS, make_list_batch

    settings = [f"model.document_max_length={MAX_LENGTH}", "stages.rerank.loss=pointwise_bce"]
    run = override(get_recipe("reranker"), settings)
    model = build_model(run.model, resolve_model(MINILM), seed=0).train()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=2e-5, fused=True)
    passable, how = (
        EngineModule(model),
        StepSettings(MICRO_BATCH_TOKENS, False, torch.device("cpu")),
    )
    records = [
        Record(str(i), q, (of[0],), "pairs", negatives=tuple(map(Negative, of[1:])))
        for i, (q, of) in enumerate(lists(batch * steps))
    ]
    seconds, last = [], time.perf_counter()
    for step in range(steps):
        own = records[step * batch : (step + 1) * batch]
        made = make_list_batch(step, own, DOCUMENTS - 1, model.tokenizer)
        LISTS.run_step(model, passable, lambda loss, _: loss.backward(), made, run.stages[0], how)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - last)
        last = time.perf_counter()
    return rate(seconds, batch)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", choices=SIDES, help="run one side only and print its rate")
    args = parser.parse_args()
    if args.side:
        kind, _, dtype = args.side.partition(" ")
        given = (args.batch, args.steps)
        found = bare(*given) if kind == "bare" else peer(*given, dtype)
        print("RATE", found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        return
    plain = dict(os.environ)  # rayembed's import changes it
    from rayembed.machine.cores import num_cores
    from rayembed.recipes.catalogue import get_recipe
    from rayembed.training.train_function_on_ray import worker_environment

    # The bare loop gets what the job's workers get: threads and allocator.
    placement = get_recipe("reranker").placement.model_copy(
        update={"threads_per_worker": num_cores()}
    )
    ours = {**plain, **worker_environment(placement)}
    seen = {side: [] for side in SIDES}
    for _ in range(args.rounds):
        for side in SIDES:
            command = [sys.executable, __file__, "--side", side]
            command += ["--batch", str(args.batch), "--steps", str(args.steps)]
            given = ours if side == "bare" else plain
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=given)
            told = [line for line in done.stdout.splitlines() if line.startswith("RATE ")]
            if not told:
                sys.exit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
            seen[side].append(tuple(map(float, told[-1].split()[1:])))
    print("| side | lists/s (median) | least | most | GiB at most | over the best peer |")
    print("|---|---|---|---|---|---|")
    middle = {side: statistics.median(r for r, _ in found) for side, found in seen.items()}
    best = max(middle["peer bf16"], middle["peer fp32"])
    for side, found in seen.items():
        rates, memory = zip(*found, strict=True)
        print(
            f"| {side} | {middle[side]:.2f} | {min(rates):.2f} | {max(rates):.2f} "
            f"| {max(memory):.2f} | {middle[side] / best:.2f} |"
        )


if __name__ == "__main__":
    main()
