"""Store embeddings in files, so that each text is embedded once for a model and an encode
spec.

Texts are sorted into buckets by their hash. Corpora that share most of their texts (FEVER and
Climate-FEVER) then share most of what a bucket's files hold, whatever the order and the number of
their documents, as long as they have as many buckets.

N texts of a unit, D embedding width.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import xxhash

from rayembed.assets.array_files import load_arrays, save_arrays
from rayembed.assets.storage import join, list_files
from rayembed.config.document import fingerprint
from rayembed.errors import ArtifactError, StorageError
from rayembed.evaluation.model_spec import EncodeSpec

logger = logging.getLogger(__name__)

Precision = Literal["float32", "float16"]

HASH_BYTES = 16

_SMALL, _LARGE = 512, 8192
"""Most texts of a bucket in a small and in a large corpus: a small one must give work to all
workers, a large one must not make hundreds of thousands of files."""

_MOST_SMALL = 256
"""Buckets up to which they stay small."""


def hashes_of(texts: Sequence[str]) -> np.ndarray:
    """Hash texts with XXH3: (N, 16) uint8, most significant byte first."""
    digests = b"".join(xxhash.xxh3_128_digest(text.encode()) for text in texts)
    return np.frombuffer(digests, dtype=np.uint8).reshape(len(texts), HASH_BYTES)


def num_buckets(count: int) -> int:
    """Number of buckets for a corpus of `count` texts: a power of two that depends only on the
    count.

    Not by the workers: the texts of a unit must be the same for any number of them.
    """
    small = min(_power_of_two(count / _SMALL), _MOST_SMALL)
    return max(small, _power_of_two(count / _LARGE))


def buckets_of(hashes: np.ndarray, buckets: int) -> np.ndarray:
    """Bucket index (N,) int64 from the highest bits of the (N, 16) hashes."""
    high = hashes[:, :4].copy().view(">u4")[:, 0].astype(np.int64)
    return high >> (32 - (buckets - 1).bit_length()) if buckets > 1 else np.zeros_like(high)


def _power_of_two(value: float) -> int:
    return 1 << max(0, int(np.ceil(np.log2(max(1.0, value)))))


@dataclass(frozen=True)
class EmbeddingBucket:
    """One of the buckets into which the texts of an encode spec are divided by their hashes."""

    encode_spec: EncodeSpec
    number: int
    of: int


@dataclass(frozen=True)
class EmbeddingStore:
    """Files with the stored embeddings of one evaluated model."""

    folder: str
    """Folder on disks or in object storage, the same for all workers; named by the model's
    fingerprint."""
    precision: Precision = "float32"
    """Number type of embeddings, stored and returned: a first run rounds as later runs read."""

    def read(self, bucket: EmbeddingBucket, wanted: np.ndarray) -> dict[bytes, np.ndarray]:
        """Return the stored embeddings (D,) by text hash, for each of the (N, 16) hashes that has
        one.

        The files are those of this moment: a task finds what another one embedded beside it. A
        broken file is warned of and counts as missing.
        """
        left = {row.tobytes() for row in wanted}
        found: dict[bytes, np.ndarray] = {}
        folder = self._folder(bucket)
        for name in list_files(folder, recursive=False):
            if not name.endswith(".npz"):
                continue  # one that is being written
            path = join(folder, name)
            try:
                loaded = load_arrays(path)
            except StorageError:
                raise
            except ArtifactError as error:
                logger.warning(
                    "cannot read the stored embeddings %s, so their texts are embedded again: %s",
                    path,
                    error,
                )
                continue
            for row, vector in zip(loaded["hashes"], loaded["vectors"], strict=True):
                if (key := row.tobytes()) in left:
                    found[key] = vector
            left -= found.keys()
            if not left:
                break
        return found

    def write(self, bucket: EmbeddingBucket, hashes: np.ndarray, vectors: np.ndarray) -> None:
        """Store embeddings (N, D) of the texts with the given (N, 16) hashes."""
        name = f"{xxhash.xxh3_64_hexdigest(hashes.tobytes())}.npz"
        path = join(self._folder(bucket), name)
        save_arrays(path, hashes=hashes, vectors=self.rounded(vectors))

    def rounded(self, vectors: np.ndarray) -> np.ndarray:
        """Round vectors to the stored number type, as a later `read` returns them."""
        return vectors.astype(np.float32 if self.precision == "float32" else np.float16)

    def _folder(self, bucket: EmbeddingBucket) -> str:
        # Of another precision there may be embeddings from another run; they are not mixed.
        name = fingerprint(asdict(bucket.encode_spec))
        return join(self.folder, self.precision, name, str(bucket.of), f"{bucket.number:06d}")


@dataclass(frozen=True)
class TextUnit:
    """Distinct texts of one bucket, which a worker embeds or searches as one unit of work."""

    bucket: EmbeddingBucket
    texts: tuple[str, ...]


def places_by_bucket(hashes: np.ndarray, buckets: int) -> Mapping[int, np.ndarray]:
    """Map each bucket to the increasing indices of its texts; buckets without texts are
    left out.
    """
    numbers = buckets_of(hashes, buckets)
    order = np.argsort(numbers, kind="stable")
    starts = np.searchsorted(numbers[order], np.arange(buckets + 1))
    return {
        number: order[starts[number] : starts[number + 1]]
        for number in range(buckets)
        if starts[number] < starts[number + 1]
    }
