"""How texts are embedded in a task: part of what an embedding is kept and found by."""

from dataclasses import dataclass

from rayembed.models.contract import Role


@dataclass(frozen=True)
class EncodeSpec:
    """All that decides a text's vector besides the text and the model.

    Texts of one encode spec go through the model together; tasks that share one share vectors.
    """

    role: Role
    """Role of the texts, query or document. Texts of symmetric tasks are queries."""
    instruction: str = ""
    """For models with an instruction template the task definition that it takes, for all others
    the literal text before each text; empty for none."""
    task: str = ""
    """Only for encoders that want mteb's whole task metadata: see `task_text`."""
    prompt_type: str = ""
    """Only for encoders of mteb and of sentence-transformers: mteb's own prompt type, empty for
    symmetric tasks, which such encoders tell from queries."""
    context: str = ""
    """Names the corpus that the model is told about, for contextual models."""
