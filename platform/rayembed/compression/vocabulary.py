"""A smaller vocabulary: the tokens that texts have, and the embeddings of these."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import PositiveInt

from rayembed.compression.contract import Compressed, Compression, Source


class Vocabulary(Compression):
    """The tokens that occur in texts, such as those of a few languages; embeddings of others go.

    Texts of kept tokens have the same pieces and the same vectors as before. Special tokens stay,
    and so do single characters or bytes: no text becomes unknown that was not, it has more pieces.
    The texts should be many, and of all languages and subjects that the model is for.
    """

    is_cut: ClassVar[bool] = True

    kind: Literal["vocabulary"] = "vocabulary"
    size: PositiveInt | None = None
    """Most tokens that are kept, of those that occur the most frequent ones; None: all."""
    min_count: PositiveInt = 1
    """Occurrences of a token from which on it is kept."""

    needs_texts: ClassVar[bool] = True

    @property
    def fewest_texts(self) -> int:
        """Fewest of a draw; a family of sizes gives all texts of its training data."""
        return 10_000

    @property
    def label(self) -> str:
        """Short name: `vocabulary`, `vocabulary-8000`, `vocabulary-from-3`."""
        size = "" if self.size is None else f"-{self.size}"
        return f"vocabulary{size}" + (f"-from-{self.min_count}" if self.min_count > 1 else "")

    def check(self, folder: Path) -> None:
        """Check that the model's tokenizers are of a kind that can be cut."""
        from rayembed.compression.cut_vocabulary import check_vocabulary

        check_vocabulary(folder)

    def compress(self, source: Source, output: Path) -> Compressed:
        """Write the model with fewer tokens."""
        from rayembed.compression.cut_vocabulary import cut_vocabulary

        return cut_vocabulary(self, source, output)
