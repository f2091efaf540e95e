"""A model under evaluation that needs no weights: hashed words, seen by all tests alike."""

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from mteb.types import PromptType
from word_encoder import word_vectors

from rayembed.config.types import FLOAT32, StoredVectors
from rayembed.evaluation.model_spec import EncodeSpec, model_meta


def vectors_of(texts, encode_spec):
    """(N, D) float32 that depend on role and instruction too, and are not of one length."""
    longer = np.array([[1 + 0.1 * (len(text) % 7)] for text in texts])
    told = word_vectors([f"{encode_spec.role}{encode_spec.instruction}".replace(" ", "")])
    return (longer * (word_vectors(texts) + 0.1 * told)).astype(np.float32)


@dataclass(frozen=True)
class WordSpec:
    """Picklable; notes what it embeds in a file, one text a line."""

    log: str = ""
    similarity: str = "cosine"
    deadly: bool = False
    """The first worker that embeds texts of an encode spec ends at once, as if it were killed."""
    meta: object = field(default_factory=lambda: model_meta("words", "1"))
    fingerprint: str = "words-1"
    conditions: dict = field(default_factory=dict)
    stored: StoredVectors = FLOAT32

    def encode_spec(self, task_metadata, prompt_type):
        if prompt_type == PromptType.document:
            return EncodeSpec("document")
        return EncodeSpec("query", instruction=f"{task_metadata.name}: ")

    def load(self, device):
        del device

        def embed(texts, encode_spec):
            if self.log:
                with Path(self.log).open("a", encoding="utf-8") as file:
                    file.write("".join(f"{encode_spec.role}\t{text}\n" for text in texts))
                died = Path(f"{self.log}.died.{encode_spec.role}.{encode_spec.instruction}")
                if self.deadly and not died.exists():
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            return vectors_of(texts, encode_spec)

        return embed
