"""Text lengths of a stage, which may be shorter than the model's."""

import copy

from rayembed.config.stage import StageConfig
from rayembed.models.contract import PromptTokenizer, Tokenizer, TrainingTokenizer


def stage_tokenizer(stage: StageConfig, tokenizer: Tokenizer) -> Tokenizer:
    """The training tokenizer, with the stage's lengths if it sets any.

    The given one is left as it is.
    """
    read = tokenizer.in_training() if isinstance(tokenizer, TrainingTokenizer) else tokenizer
    wanted = {"query": stage.query_max_length, "document": stage.document_max_length}
    if not any(wanted.values()):
        return read
    changed: PromptTokenizer = copy.copy(read)  # type: ignore[assignment] # all models' are
    changed.max_lengths = {r: wanted[r] or length for r, length in changed.max_lengths.items()}
    return changed
