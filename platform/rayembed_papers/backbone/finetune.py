"""Finetune a model with transformers' Trainer, and predict with it."""

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rayembed.config.backbone import Dtype
from rayembed.errors import DivergenceError
from rayembed_papers.backbone.kinds import Batch, Output, Predict
from rayembed_papers.backbone.settings import FinetuneProtocol
from rayembed_papers.backbone.tokens import Feature


@dataclass(frozen=True)
class Grid:
    """Settings that differ between the trials of a finetuning."""

    learning_rate: float
    batch_size: int
    seed: int


def finetune(
    model: nn.Module,
    inputs: Sequence[Feature],
    collate: Callable[[Sequence[Feature]], Batch],
    protocol: FinetuneProtocol,
    grid: Grid,
    *,
    precision: Dtype,
    use_gpu: bool,
) -> float:
    """Train the model in place; return the mean loss of all steps, NaN if it diverged.

    AdamW, the rate rising over the warm-up and then falling linearly to zero. Rows come in another
    order in each epoch; the last batch of an epoch may be smaller.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="finetune-") as scratch:
        arguments = transformers.TrainingArguments(
            output_dir=scratch,
            num_train_epochs=protocol.epochs,
            per_device_train_batch_size=grid.batch_size,
            learning_rate=grid.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=protocol.warmup_share,
            max_grad_norm=protocol.max_grad_norm,
            weight_decay=protocol.weight_decay,
            adam_beta1=protocol.adam_betas[0],
            adam_beta2=protocol.adam_betas[1],
            adam_epsilon=protocol.adam_epsilon,
            optim="adamw_torch",
            seed=grid.seed,
            bf16=precision == "bfloat16",
            use_cpu=not use_gpu,
            dataloader_pin_memory=use_gpu,
            remove_unused_columns=False,
            save_strategy="no",
            eval_strategy="no",
            logging_strategy="no",
            logging_nan_inf_filter=False,  # it would hide that a loss diverged
            report_to="none",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=list(inputs), data_collator=collate
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return float(trainer.train().training_loss)


def predictor(model: nn.Module, *, rows: int, precision: Dtype, device: str) -> Predict:
    """Return a function that runs the model on inputs and returns float32 outputs in the same
    order.

    It raises a DivergenceError where an output is not finite: an argmax of such names a class all
    the same.

    Args:
        rows: of a forward pass; inputs of like length go together.
    """
    cast: Any = contextlib.nullcontext()
    if precision == "bfloat16":
        cast = torch.autocast(device, dtype=torch.bfloat16)

    @torch.inference_mode()
    def predict(
        inputs: Sequence[Feature], collate: Callable[[Sequence[Feature]], Batch]
    ) -> list[Output]:
        model.eval().to(device)
        found: list[Output] = [{} for _ in inputs]
        order = sorted(range(len(inputs)), key=lambda place: -len(inputs[place]["input_ids"]))
        for begin in range(0, len(order), rows):
            places = order[begin : begin + rows]
            batch = _moved(collate([inputs[place] for place in places]), device)
            with cast:
                output = model(**batch)
            kept = {
                name: output[name].float().cpu().numpy()
                for name in ("logits", "start_logits", "end_logits", "vectors")
                if output.get(name) is not None
            }
            if not all(np.isfinite(values).all() for values in kept.values()):
                raise DivergenceError("the fine-tuned model's outputs are not finite")
            for row, place in enumerate(places):
                found[place] = {name: np.array(values[row]) for name, values in kept.items()}
        return found

    return predict


def _moved(batch: Batch, device: str) -> Batch:
    return {
        name: _moved(value, device) if isinstance(value, dict) else value.to(device)
        for name, value in batch.items()
    }
