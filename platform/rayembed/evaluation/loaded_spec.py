"""Evaluate a model that is already in memory."""

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mteb.models import ModelMeta

from rayembed.config.evaluation import CONTEXT_SEED
from rayembed.config.types import FLOAT32, Role, StoredVectors
from rayembed.evaluation.jobs import TaskFactory
from rayembed.evaluation.model_spec import EmbedTexts, PromptedSpec, Similarity
from rayembed.evaluation.pooled.here import run_here
from rayembed.evaluation.prompts import ModelPrompts
from rayembed.evaluation.rayembed_spec import RayembedEncoder, with_literal_prompts
from rayembed.evaluation.score import Store, score
from rayembed.models.contract import EmbeddingModel


@dataclass(frozen=True)
class LoadedSpec(PromptedSpec):
    """Spec of a model that is already loaded in this process; texts are embedded on the model's
    device.
    """

    model: EmbeddingModel
    meta: ModelMeta
    prompts: ModelPrompts
    max_lengths: tuple[tuple[Role, int], ...]
    context_seed: int
    num_context: int
    """Documents that a context holds, at most; 0: texts are embedded without a task's corpus."""
    similarity: Similarity = "cosine"
    dimension: int | None = None
    """Number of first values of each vector that are kept; None: all."""
    stored: StoredVectors = FLOAT32

    @property
    def fingerprint(self) -> str:
        """Revision in the model's metadata, which depends on its weights."""
        return str(self.meta.revision)

    @property
    def conditions(self) -> dict[str, str]:
        """Describe the number type, maximum lengths, vector width and number of context
        documents.
        """
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        width = self.dimension or self.model.dimensions[0]
        found = {"dtype": dtype, "dimensions": str(width)}
        found |= {f"{role}_max_length": str(length) for role, length in self.max_lengths}
        return found | ({"context": str(self.num_context)} if self.model.uses_context else {})

    def load(self, device: str) -> EmbedTexts:
        """Copy the model, set the evaluation's maximum text lengths, and return its embedding
        function.
        """
        del device
        cut: Any = copy.copy(self.model)
        cut.tokenizer = copy.copy(self.model.tokenizer)
        cut.tokenizer.max_lengths = dict(self.max_lengths)
        literal, plain = with_literal_prompts(cut), cut.tokenizer
        return RayembedEncoder(literal, plain, self.dimension or self.model.dimensions[0])


def loaded_spec(
    model: EmbeddingModel,
    meta: ModelMeta,
    prompts: ModelPrompts,
    max_lengths: tuple[tuple[Role, int], ...],
    *,
    seed: int = CONTEXT_SEED,
    num_context: int | None = None,
    dimension: int | None = None,
) -> LoadedSpec:
    """Make the spec of a loaded model; a contextual model embeds texts in the context of each
    task's corpus.

    Args:
        max_lengths: tokens that are read of a text; `lengths_read` says how many are where the
            model's folder is scored.
        seed: of the draw of context documents.
        num_context: how many are drawn; None: as many as the model takes. 0: what corpus the model
            has, if any.
        dimension: so many first values of each vector are kept; None: all.
    """
    number = model.max_context if num_context is None and model.uses_context else num_context
    return LoadedSpec(model, meta, prompts, max_lengths, seed, number or 0, dimension=dimension)


def scores_of(
    spec: LoadedSpec, tasks: Sequence[TaskFactory], results_folder: str | Path, device: str
) -> dict[str, float]:
    """Evaluate a loaded model in this process; return the main score of each task and write all
    results to a folder.

    Raises:
        RayembedError: a task cannot be scored.
    """
    pool = partial(run_here, device=device)
    with tempfile.TemporaryDirectory(prefix="embeddings-") as embeddings:
        scored = score(spec, tasks, pool, Store(str(results_folder), embeddings))
    for _, error in scored.failed:
        raise error
    return scored.scores
