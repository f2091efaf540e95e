"""Distillation of hidden states: squared errors between a student's states and its teacher's,
computed in each step.

The L_kd of NV-Embed's distillation (arXiv 2405.17428, appendix A.2): the sum over layers of the
mean squared error of their outputs.

N places of a micro-batch, padding included, H hidden size, S layers of the student, T of the
teacher.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayembed.config.stage import HiddenStates
from rayembed.config.types import Role
from rayembed.errors import ConfigError
from rayembed.models.attention.packed import Packed
from rayembed.models.contract import EmbeddingModel, EmbedOutput, PromptTokenizer
from rayembed.models.layers import layers_of
from rayembed.models.transformer_model import TransformerModel

_ENTRIES = 2
"""Error and tokens, behind the model's own statistics."""

_TEXT, _INSTRUCTION = "A word", "Find what answers it"


class StateErrors:
    """Runs the student and its teacher on a micro-batch, and adds the errors between their hidden
    states to the statistics.

    A hidden state is what a layer puts out: that of the last one comes before the final norm. Layer
    i of the student is compared with layer ⌈i·T/S⌉ of the teacher, both counted from 1, so that the
    last ones meet (TinyBERT's uniform mapping, arXiv 1909.10351). The teacher, in evaluation mode
    and without gradient, reads the student's own micro-batch.

    No module, so that an engine neither partitions, casts nor saves the teacher.
    """

    def __init__(self, student: EmbeddingModel, teacher: EmbeddingModel) -> None:
        self._student = student
        self._teacher = teacher.eval().requires_grad_(False)

    def __call__(self, batch: dict[str, Tensor]) -> EmbedOutput:
        """Run a collated micro-batch through the student, and add two entries to its
        statistics.

        They are the sum over tokens and layers of the squared error, mean over the width, and the
        number of tokens. Padding does not count, and a text counts as in `EmbedOutput.statistics`.
        """
        with torch.no_grad(), _states(self._teacher) as wanted:
            self._teacher(batch)
        with _states(self._student) as own:
            output: EmbedOutput = self._student(batch)
        counts = _counts(batch)
        # Of each layer only the two states are kept for the backward pass, of which the student's
        # is the next layer's input anyhow: differences in float32 would take twice as much.
        errors = [
            checkpoint(
                _error, state, wanted[place], counts, use_reentrant=False, preserve_rng_state=False
            )
            for state, place in zip(own, compared_layers(len(own), len(wanted)), strict=True)
        ]
        mine = torch.stack([torch.stack(errors).sum(), counts.sum()])
        of_model = [] if output.statistics is None else [output.statistics]
        return output._replace(statistics=torch.cat([*of_model, mine]))


def compared_layers(student: int, teacher: int) -> list[int]:
    """Return for each student layer the index (from 0) of the teacher layer that it is compared
    with.

    Args:
        student: layers of the student, at most as many as the teacher's.
    """
    return [-(-layer * teacher // student) - 1 for layer in range(1, student + 1)]


def auxiliary_loss(
    model: EmbeddingModel, statistics: Tensor, settings: HiddenStates | None
) -> Tensor:
    """Compute the scalar added to the loss from statistics of the global batch: the model's own
    term plus the weighted mean error of hidden states.
    """
    if settings is None:
        return model.auxiliary_loss(statistics)
    own, (error, tokens) = statistics[:-_ENTRIES], statistics[-_ENTRIES:]
    loss: Tensor = settings.weight * error / tokens
    return loss + model.auxiliary_loss(own) if len(own) else loss


def statistics_metrics(
    model: EmbeddingModel, statistics: Tensor, settings: HiddenStates | None
) -> dict[str, float]:
    """Compute metrics for the log from the statistics: the model's own, and `hidden_states/error`
    before weighting.
    """
    if settings is None:
        return model.statistics_metrics(statistics)
    own, (error, tokens) = statistics[:-_ENTRIES], statistics[-_ENTRIES:]
    metrics = model.statistics_metrics(own) if len(own) else {}
    return {**metrics, "hidden_states/error": float(error / tokens)}


def check_comparable(setting: str, student: EmbeddingModel, teacher: EmbeddingModel) -> None:
    """Raise unless the hidden states of two models can be compared; the models may be on the meta
    device.

    Args:
        setting: that names the teacher, for messages.

    Raises:
        ConfigError: other architectures, or two transformers in one; other widths; fewer layers
            than the student has; or tokenizers that give other ids.
    """
    reason = _why_not_comparable(student, teacher)
    if reason is not None:
        raise ConfigError(
            f"{setting}: {reason}. Hidden states can only be compared with an uncompressed "
            "or larger copy of the same model; name such a copy, or learn from the "
            "teacher's embeddings instead (loss.kind=vector_distillation, with "
            f"teachers=[{{teacher: …}}])"
        )


def _why_not_comparable(student: EmbeddingModel, teacher: EmbeddingModel) -> str | None:
    if not isinstance(student, TransformerModel) or not isinstance(teacher, TransformerModel):
        return f"{type(student).__name__} or {type(teacher).__name__} is no single transformer"
    kinds = student.config.kind, teacher.config.kind
    if kinds[0] != kinds[1]:
        return f"the teacher's architecture is {kinds[1]}, the model's {kinds[0]}"
    if len(student.parts) > 1:
        return (
            f"{kinds[0]} has {len(student.parts)} transformers ({', '.join(student.parts)}), whose "
            "layers do not line up"
        )
    own, others = student.backbone, teacher.backbone
    widths = own.config.hidden_size, others.config.hidden_size
    if widths[0] != widths[1]:
        return f"the teacher's states are {widths[1]} wide, the model's {widths[0]}"
    layers = len(layers_of([own])), len(layers_of([others]))
    if layers[0] > layers[1]:
        return f"the teacher has {layers[1]} layers, fewer than the model's {layers[0]}"
    return _why_other_ids(student.tokenizer, teacher.tokenizer)


def _why_other_ids(student: PromptTokenizer, teacher: PromptTokenizer) -> str | None:
    words = student.pretrained.get_vocab(), teacher.pretrained.get_vocab()
    if words[0] != words[1]:
        differing = len(words[0].items() ^ words[1].items())
        return (
            f"the teacher's vocabulary has {len(words[1]):,} tokens, the model's {len(words[0]):,},"
            f" and {differing:,} entries are in one of them alone"
        )
    roles: tuple[Role, ...] = ("query", "document")
    for role in roles:
        own, others = (
            one.with_prompts([_TEXT], [""], role)[0]["input_ids"].tolist()
            for one in (student, teacher)
        )
        if own != others:
            return f"a {role} becomes the ids {others} in the teacher and {own} in the model"
        before, others_before = (
            one.prompt(_INSTRUCTION, role).replace(_INSTRUCTION, "…") for one in (student, teacher)
        )
        # A folder that states no prompt says nothing of those that a run gives.
        if others_before.strip() != "…" and before != others_before:
            return (
                f"before a {role} the teacher has {others_before!r} and the model {before!r}, … "
                f"being an instruction; set model.{role}_prefix or the model's template as the "
                "teacher's"
            )
    return None


@contextmanager
def _states(model: EmbeddingModel) -> Iterator[list[Tensor]]:
    """Yield a list that collects the output of each layer, in execution order, while the block
    runs.

    Outside of the block nothing is kept: layers that are recomputed in the backward pass run again.
    """
    found: list[Tensor] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def keep(layer: nn.Module, inputs: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep) for layer in layers_of(model.trained_parts)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _counts(batch: dict[str, Tensor]) -> Tensor:
    """(N,) float32 number of times that each token position counts in the error, 0 for padding."""
    occurrences = batch.get("occurrences")
    packed = Packed.of(batch)
    if packed is None:
        mask = batch["attention_mask"].float()
        return (mask if occurrences is None else mask * occurrences.float()[:, None]).flatten()
    ids = batch["input_ids"]
    if occurrences is None:
        return torch.ones(len(ids), device=ids.device)
    return packed.of_tokens(occurrences.float(), len(ids))


def _error(own: Tensor, wanted: Tensor, counts: Tensor) -> Tensor:
    """Sum the squared error over token positions, after a mean over the width; the states are (…,
    H).
    """
    errors = (own.float() - wanted.float()).square().mean(dim=-1)
    return (errors.flatten() * counts).sum()
