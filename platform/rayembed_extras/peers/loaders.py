"""References to models that other libraries load, and the functions that open them."""

import re
from pathlib import Path

from rayembed.evaluation.model_spec import ModelLoader


def _is_named(reference: str) -> bool:
    """Whether the reference is `mteb:org/name`, or `org/name` without a folder of that name."""
    plain = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?: \(.+\))?", reference)
    return reference.startswith("mteb:") or (plain is not None and not Path(reference).exists())


MTEB = ModelLoader(_is_named, "rayembed_extras.peers.mteb_spec:mteb_spec")

SENTENCE_TRANSFORMERS = ModelLoader(
    lambda reference: reference.startswith("st:"),
    "rayembed_extras.peers.sentence_spec:sentence_spec",
)
