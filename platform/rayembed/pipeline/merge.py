"""Several trained models of one architecture become one in a folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayembed.errors import ArtifactError
from rayembed.progress import doing

if TYPE_CHECKING:
    from torch import Tensor

    from rayembed.models.merge import Method

MERGE_FILE = "merge.json"
"""File of a merged model's folder: method, models and shares."""


def merge_models(
    references: Sequence[str],
    output: Path,
    *,
    method: "Method" = "linear",
    shares: Sequence[float] | None = None,
) -> None:
    """Save the merged model in `output`, with what it was made of beside it.

    Its settings, tokenizer and prompts are those of the last model, for a base that is merged with
    its fine-tuned model stands first. One model is in memory at a time, beside the sum, both in
    float32.

    Args:
        references: asset references of models, in the order of the shares; checkpoints of stages
            are exported first, see `models_of`.
        method, shares: see `rayembed.models.merge.merge`.

    Raises:
        ArtifactError: models that do not fit each other, or `output` holds something else.
        AssetError: a reference leads nowhere.
        ConfigError: shares that the method cannot take.
    """
    from rayembed.assets.resolver import resolve_model
    from rayembed.models.export import check_target
    from rayembed.models.load import load_model, saved_dtype
    from rayembed.models.merge import check_shares, merge
    from rayembed.models.saved_prompts import saved_instructions
    from rayembed.pipeline.checkpoint_models import models_of

    shares = check_shares(method, len(references), shares)
    check_target(output)
    references = models_of(references)
    folders = [resolve_model(reference) for reference in references]
    words: dict[str, int] = {}

    def read(reference: str, folder: Path) -> dict[str, "Tensor"]:
        with doing(f"reading {reference}"):
            model = load_model(folder, dtype="float32")
        own = model.tokenizer.pretrained.get_vocab()
        if words and own != words:
            raise ArtifactError(
                f"{reference} cannot be merged with {references[0]}: their tokenizers have other "
                "vocabularies, so that equal places of their embeddings stand for other words"
            )
        words.update(own)
        return model.state_dict()

    # No model has a name here, under which it would outlive its turn.
    weights = (read(*each) for each in zip(references, folders, strict=True))
    merged = merge(method, weights, shares)
    last = load_model(folders[-1], dtype=saved_dtype(folders[-1]))
    last.load_state_dict(merged)
    last.save(output, instructions=saved_instructions(folders[-1], last.config))
    made_of = {"method": method, "models": list(references), "shares": list(shares)}
    (output / MERGE_FILE).write_text(json.dumps(made_of, indent=2) + "\n")
