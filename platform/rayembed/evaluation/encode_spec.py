"""The role, instruction and context of embedded texts: part of the key of a kept embedding."""

from dataclasses import dataclass

from rayembed.config.types import Role


@dataclass(frozen=True)
class EncodeSpec:
    """All that decides a text's vector besides the text and the model.

    Texts of one encode spec go through the model together; tasks that share one share vectors.
    """

    role: Role
    """Role of the texts, query or document. Texts of symmetric tasks are queries."""
    instruction: str = ""
    """Task definition for models with an instruction template; for all others the literal text
    before each text; empty for none."""
    task: str = ""
    """The task's metadata, for encoders that want all of it: see `task_text`."""
    prompt_type: str = ""
    """Prompt type of mteb, for its encoders and those of sentence-transformers; empty for symmetric
    tasks, which such encoders tell from queries."""
    context: str = ""
    """Names the corpus that the model is told about, for contextual models."""
