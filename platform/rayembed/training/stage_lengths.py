"""How a stage reads texts: in training, and maybe less of them than the model may."""

import copy

from rayembed.config.stage import StageConfig
from rayembed.models.contract import PromptTokenizer, Tokenizer, TrainingTokenizer


def as_read_by(stage: StageConfig, tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer for training, with the stage's lengths where it has its own.

    The given one is left as it is.
    """
    read = tokenizer.in_training() if isinstance(tokenizer, TrainingTokenizer) else tokenizer
    wanted = {"query": stage.query_max_length, "document": stage.document_max_length}
    if not any(wanted.values()):
        return read
    changed: PromptTokenizer = copy.copy(read)  # type: ignore[assignment] # all models' are
    changed.max_lengths = {r: wanted[r] or length for r, length in changed.max_lengths.items()}
    return changed
