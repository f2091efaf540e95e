"""An embedding model as mteb sees one, with the instructions that it was trained with."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mteb.models import ModelMeta
from mteb.types import PromptType
from torch import Tensor

from rayembed.evaluation.prompts import ModelPrompts, role_of
from rayembed.models.contract import Role

logger = logging.getLogger(__name__)

Embed = Callable[[Sequence[str], Role, str], np.ndarray]
"""Texts, their role and their `Way.instruction` to vectors (N, D) float32."""


def model_meta(name: str, revision: str, **known: Any) -> ModelMeta:
    """What mteb writes down about a model; names without an organisation get `rayembed/`.

    The name and the revision are what mteb finds results by, so both must tell models apart.
    """
    unknown = dict.fromkeys(
        (
            "loader",
            "release_date",
            "n_parameters",
            "memory_usage_mb",
            "max_tokens",
            "embed_dim",
            "license",
            "public_training_code",
            "public_training_data",
            "training_datasets",
            "similarity_fn_name",
        )
    )
    stated = {
        "name": name if "/" in name else f"rayembed/{name}",
        "revision": revision,
        "languages": ["eng-Latn"],
        "open_weights": True,
        "framework": ["PyTorch"],
        "use_instructions": False,
    }
    return ModelMeta(**{**unknown, **stated, **known})


class MtebEncoder:
    """Implements mteb's `EncoderProtocol` over a function that embeds texts.

    Texts of symmetric tasks (classification, clustering, pair classification, STS) are queries on
    both sides, as in training.

    A text is embedded once for each role and instruction: vectors are kept for as long as this
    object lives, up to `cache_bytes`.
    """

    def __init__(
        self,
        embed: Embed,
        meta: ModelMeta,
        *,
        prompts: ModelPrompts | None = None,
        cache_bytes: int = 2**30,
    ) -> None:
        """The model.

        Args:
            prompts: what stands before texts; None: nothing.
        """
        self.mteb_model_meta = meta
        self._embed = embed
        self._prompts = prompts
        self._cache: dict[tuple[Role, str, str], np.ndarray] = {}
        self._bytes_left = cache_bytes

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **_options: Any,
    ) -> np.ndarray:
        """Vectors (N, D) float32 of all texts that the loader `inputs` gives, in its order."""
        del hf_split, hf_subset
        texts = [text for batch in inputs for text in batch["text"]]
        role = role_of(prompt_type)
        instruction = (
            "" if self._prompts is None else self._prompts.instruction(task_metadata, prompt_type)
        )
        keys = [(role, instruction, text) for text in texts]
        new = list(
            dict.fromkeys(
                text for key, text in zip(keys, texts, strict=True) if key not in self._cache
            )
        )
        if not new:
            return np.stack([self._cache[key] for key in keys])
        logger.info("%s: embedding %d new texts of %d", task_metadata.name, len(new), len(texts))
        vectors = np.asarray(self._embed(new, role, instruction), dtype=np.float32)
        fresh = dict(zip(new, vectors, strict=True))
        self._keep(role, instruction, fresh)
        return np.stack(
            [
                fresh[text] if text in fresh else self._cache[key]
                for key, text in zip(keys, texts, strict=True)
            ]
        )

    def _keep(self, role: Role, instruction: str, fresh: Mapping[str, np.ndarray]) -> None:
        for text, vector in fresh.items():
            if vector.nbytes > self._bytes_left:
                return
            self._bytes_left -= vector.nbytes
            self._cache[role, instruction, text] = vector

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Cosines (N1, N2) float32 of each vector with each."""
        return _unit(embeddings1) @ _unit(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Cosines (N,) float32 of the vectors of one row each."""
        return (_unit(embeddings1) * _unit(embeddings2)).sum(dim=-1)


def _unit(embeddings: Any) -> Tensor:
    vectors = torch.as_tensor(np.asarray(embeddings), dtype=torch.float32)
    return torch.nn.functional.normalize(vectors.reshape(-1, vectors.shape[-1]), dim=-1)
