"""A stage in one process and one graph under torch's AdamW, without any engine."""

import torch
from made_up_records import made_up_records

from rayembed.data.plan.step_batch import make_step_batch
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.objective import StepSettings


def plain_step(model, stage, step):
    """The report of a step over the records of seed `step`; gradients are in the parameters."""
    records = made_up_records(stage.batch.global_pairs, seed=step)
    batch = make_step_batch(step, records, stage.batch.num_negatives, model.tokenizer)
    settings = StepSettings(100_000, False, torch.device("cpu"))
    return run_step(
        model, EngineModule(model), lambda loss, last: loss.backward(), batch, stage, settings
    )


def train_plainly(model, stage):
    """Weights after the stage, and of each step the loss, the gradient's norm and the metrics.

    The rate falls linearly from the first step on.
    """
    config = stage.optimizer
    groups = [
        {
            "params": [p for p in model.parameters() if p.ndim >= 2],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, eps=config.eps)
    records = []
    model.train()
    for step in range(stage.steps):
        optimizer.zero_grad()
        report = plain_step(model, stage, step)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clipping)
        records.append({"loss": report.loss, "grad_norm": norm.item()} | report.metrics)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * (1 - step / stage.steps)
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}, records
