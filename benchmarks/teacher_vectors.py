"""CPU-seconds of a training step with a teacher's stored scores or vectors, over InfoNCE's alone.

all-MiniLM-L6-v2 is fine-tuned on pairs of the Wikipedia sample. It is its own teacher too, whose
vectors `prepare` stores:

- `infonce`: InfoNCE alone, from a plan without teachers;
- `masks`: InfoNCE with documents left out that the teacher scores above the positive;
- `vectors`: InfoNCE and the distance to the teacher's vectors, with a projection;
- `relations`: InfoNCE and the divergence from the teacher's similarities;
- `live`: InfoNCE alone, and the teacher embeds the batch, as distillation with it in the loop does.

Mining stores its scores of three negatives of each query:

- `negatives`: InfoNCE with these negatives, which `kl` and `margin` are compared with;
- `kl`: InfoNCE and the divergence from the teacher's scores of the query's documents;
- `margin`: InfoNCE and the squared difference from the teacher's margins.

The sides differ in how a batch is made (vectors are looked up in mapped files), in the loss of the
embeddings, forward and backward, and in what the teacher embeds. These parts are measured alone,
the least of several times; the rest, the model's own passes, is that of InfoNCE's step, so that a
difference of some percent is not lost in what a busy machine adds to a step. CPU-seconds are those
of the process and its threads.
Run: python benchmarks/teacher_vectors.py --pairs 64 --rounds 5
"""

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import normalize

from rayembed.assets.resolver import resolve_model
from rayembed.config.data_run import data_of
from rayembed.config.loss import Widths
from rayembed.config.mining import Teacher
from rayembed.config.override import override
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.prepare import prepare
from rayembed.data.vectors.teacher import load_teacher, weights_of
from rayembed.models.loading.build import build_model
from rayembed.pipeline.run.runtime import Here
from rayembed.recipes.sample import MINILM
from rayembed.training.contrastive.batch_loss import Targets, contrastive_loss, rows_of
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import CONTRASTIVE, run_step
from rayembed.training.objective import StepSettings
from train_speed import MICRO_BATCH_TOKENS, make_run, pairs

LOSSES = {
    "infonce": {"kind": "infonce"},
    "masks": {"kind": "infonce", "false_negatives": {"by": "teachers"}},
    "vectors": {"kind": "vector_distillation", "projection": True},
    "relations": {"kind": "similarity_distillation"},
    "live": {"kind": "infonce"},
    "negatives": {"kind": "infonce"},
    "kl": {"kind": "listwise_kl", "infonce_temperature": 0.05},
    "margin": {"kind": "margin_mse", "infonce_temperature": 0.05},
}

BASES = dict.fromkeys(("negatives", "kl", "margin"), "negatives")
"""What a side is compared with, where that is not `infonce`."""

TEACHER = Teacher(teacher=MINILM, dtype="float32")
MINING = {**TEACHER.model_dump(), "num_negatives": 3, "candidates": 20}


class Side:
    """One way to train: its plan, model and optimiser."""

    def __init__(self, name: str, folder: Path, batch: int, rounds: int, dtype: str) -> None:
        run = make_run(folder, batch, rounds)
        changes = [f"stages.only.loss={json.dumps(LOSSES[name])}", f"model.backbone.dtype={dtype}"]
        if name in ("masks", "vectors", "relations"):
            changes.append(f"stages.only.teachers={json.dumps([TEACHER.model_dump()])}")
        if name in BASES:
            changes.append(f"data.datasets.pairs.mining={json.dumps(MINING)}")
            changes.append("stages.only.batch.num_negatives=3")
        run = override(run, changes)
        plan = BatchPlan.open(prepare(run, Here().data_context(data_of(run)))["only"])
        self.stage = run.stages[0]
        self.model = build_model(run.model, resolve_model(MINILM), seed=0).train()
        self.make = CONTRASTIVE.batches(plan, self.model, self.stage, 0)
        widths = CONTRASTIVE.teacher_widths(plan)
        self.engine = EngineModule(self.model, self.stage.loss, widths)
        self.trained = [p for p in self.engine.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=2e-5, fused=True)
        self.settings = StepSettings(MICRO_BATCH_TOKENS, False, torch.device("cpu"))
        self.plan, self.live = plan, None
        if name == "live":
            self.live = load_teacher(TEACHER, weights_of(MINILM))

    def batch(self, number: int) -> None:
        """Make a batch."""
        self.made = self.make(number)

    def loss(self) -> None:
        """The loss of the batch's embeddings and its gradient."""
        loss, device = self.stage.loss, self.settings.device
        widths = Widths(384, tuple(v.shape[1] for v in self.made.teacher_vectors))
        initial = loss.initial_parameters(widths)
        parameters = {name: value.requires_grad_() for name, value in initial.items()}
        embeddings = normalize(torch.randn(len(self.made.tokens), 384, requires_grad=True), dim=1)
        targets = Targets.of(self.made, device)
        rows = rows_of(self.made, device)
        contrastive_loss(embeddings, rows, targets, self.stage, parameters).backward()

    def embed(self, number: int) -> None:
        """What a teacher in the loop does."""
        records = self.plan.read(number)
        self.live([record.query for record in records], "query")
        self.live([record.positives[0] for record in records], "document")

    def step(self, number: int) -> None:
        """A whole step."""
        self.batch(number)
        run_step(
            self.model,
            self.engine,
            lambda loss, _: loss.backward(),
            self.made,
            self.stage,
            self.settings,
        )
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def least(works: Mapping[str, Callable[[], None]], times: int) -> dict[str, float]:
    """Fewest CPU-seconds of each in some rounds, after one that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(times + 1):
        for name, work in works.items():
            began = time.process_time()
            work()
            found[name].append(time.process_time() - began)
    return {name: min(seconds[1:]) for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=64, help="of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"query": q, "positive": d} for q, d in pairs(args.pairs)]
        (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
        sides = {side: Side(side, folder, args.pairs, 1, args.dtype) for side in LOSSES}
        seldom = {
            "infonce": partial(sides["infonce"].step, 0),
            "negatives": partial(sides["negatives"].step, 0),
            "live": partial(sides["live"].embed, 0),
        }
        whole = least(seldom, args.rounds)
        live = whole.pop("live")
        batch = least({n: partial(side.batch, 0) for n, side in sides.items()}, 30)
        loss = least({n: side.loss for n, side in sides.items()}, 30)
    alone, hard = whole["infonce"], whole["negatives"]
    print(f"a step of InfoNCE: {alone:.2f} CPU-s, with the mined negatives {hard:.2f}\n")
    print("| side | batch, CPU-ms | loss, CPU-ms | teacher, CPU-s | step over InfoNCE's |")
    print("|---|---|---|---|---|")
    for name in sides:
        teacher = live if name == "live" else 0.0
        base = BASES.get(name, "infonce")
        more = batch[name] + loss[name] + teacher - batch[base] - loss[base]
        parts = f"{1e3 * batch[name]:.1f} | {1e3 * loss[name]:.1f} | {teacher:.2f}"
        print(f"| {name} | {parts} | {1 + more / whole[base]:.4f} |")


if __name__ == "__main__":
    main()
