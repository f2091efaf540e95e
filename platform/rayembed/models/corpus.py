"""Corpus context of a model: its representative documents, and the file of their vectors."""

import heapq
from collections.abc import Iterable
from pathlib import Path

import xxhash
from torch import Tensor

from rayembed.errors import ArtifactError

CORPUS_FILE = "corpus.safetensors"
_NAME = "context"


def save_corpus(vectors: Tensor, folder: Path) -> None:
    """Write (n, h) context vectors into a model's folder, as float32."""
    import safetensors.torch

    safetensors.torch.save_file({_NAME: vectors.float().cpu().contiguous()}, folder / CORPUS_FILE)


def load_corpus(folder: Path) -> Tensor | None:
    """Read the (n, h) float32 context vectors in a model's folder; None if it has none.

    Raises:
        ArtifactError: the file is damaged.
    """
    import safetensors
    import safetensors.torch

    path = folder / CORPUS_FILE
    if not path.is_file():
        return None
    try:
        return safetensors.torch.load_file(path)[_NAME]
    except (OSError, KeyError, safetensors.SafetensorError) as error:
        raise ArtifactError(f"cannot read the corpus {str(path)!r}: {error}") from error


def random_documents(documents: Iterable[str], number: int, *, seed: int) -> list[str]:
    """Sample of distinct documents of a corpus; all if it has fewer.

    Those with the smallest seeded hashes, in the order of these: the draw depends on what the
    corpus holds, not on how it is ordered or cut, and reads it once. Empty documents are left out.
    """
    if number == 0:
        return []
    # The heap holds the largest hash on top, so that a smaller one takes its place.
    kept: list[tuple[int, str]] = []
    held: set[str] = set()
    for text in documents:
        if text in held or not text.strip():
            continue
        place = xxhash.xxh3_64_intdigest(text.encode(), seed=seed)
        if len(kept) < number:
            heapq.heappush(kept, (-place, text))
        elif -place > kept[0][0]:
            held.remove(heapq.heapreplace(kept, (-place, text))[1])
        else:
            continue
        held.add(text)
    return [text for _, text in sorted((-place, text) for place, text in kept)]
