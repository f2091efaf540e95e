"""Divide documents into the texts that are embedded: by tokens, sentences or headings."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rayembed.config.types import has_content
from rayembed.data.sources.structure import sections
from rayembed.data.words import split_sentences
from rayembed.errors import ConfigError
from rayembed.models.contract import PromptTokenizer
from rayembed_extras.indexing.settings import Chunks

Split = Callable[[Sequence[str]], list[list[str]]]
"""Function from documents to the pieces of each, in order; at least one piece each."""

_LEAD = "# lead\n"
"""Heading put before a document, so that the text before its own first heading is a section."""


def splitter(settings: Chunks, tokenizer: PromptTokenizer | None) -> Split:
    """Return the function that divides documents by the settings.

    Args:
        tokenizer: the model's; not used for whole documents.
    """
    if settings.by == "document" or tokenizer is None:
        return lambda texts: [[text] for text in texts]
    cut = _Cut(settings, tokenizer)
    return lambda texts: [
        [piece for piece in pieces if has_content(piece)] or [text]
        for text, pieces in zip(texts, cut(texts), strict=True)
    ]


def check_size(settings: Chunks, tokenizer: PromptTokenizer, prompt: str) -> None:
    """Raise if the model would cut pieces of the set size.

    Args:
        prompt: literal prompt before each text.

    Raises:
        ConfigError: a piece and its prompt take more tokens than the model reads.
    """
    room = tokenizer.budget("document") - tokenizer.num_prompt_tokens(prompt)
    if settings.by != "document" and settings.size > room:
        raise ConfigError(
            f"documents.chunks.size={settings.size}, but the model reads at most {room} tokens of "
            f"a text; set documents.chunks.size={room} or less"
        )


class _Cut:
    """Callable that divides a batch of documents into pieces of limited token count."""

    def __init__(self, settings: Chunks, tokenizer: PromptTokenizer) -> None:
        self._size, self._overlap = settings.size, settings.overlap
        self._by = settings.by
        self._tokenizer = tokenizer.pretrained.backend_tokenizer

    def __call__(self, texts: Sequence[str]) -> Iterator[list[str]]:
        if self._by == "tokens":
            for text, encoding in zip(texts, self._encoded(texts), strict=True):
                yield self._windows(text, encoding)
        else:
            pieces = self._by_headings if self._by == "headings" else self._by_sentences
            for text in texts:
                yield pieces(text)

    def _encoded(self, texts: Sequence[str]) -> list[Any]:
        found: list[Any] = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return found

    def _windows(self, text: str, encoding: Any) -> list[str]:
        """Cut a text at token borders, every `size - overlap` tokens."""
        offsets = encoding.offsets
        pieces, start = [], 0
        while True:
            stop = min(start + self._size, len(offsets))
            if start == 0 and stop == len(offsets):
                return [text.strip()]
            pieces.append(text[offsets[start][0] : offsets[stop - 1][1]].strip())
            if stop == len(offsets):
                return pieces
            start = stop - self._overlap

    def _by_sentences(self, text: str, size: int | None = None) -> list[str]:
        """Join whole sentences up to the size; a longer sentence is cut at token borders."""
        size = size or self._size
        pieces: list[list[tuple[str, int]]] = [[]]
        for sentence, length in self._counted(split_sentences(text), size):
            filled = sum(count for _, count in pieces[-1])
            if pieces[-1] and filled + length > size:
                pieces.append(self._kept(pieces[-1], size - length))
            pieces[-1].append((sentence, length))
        return [" ".join(sentence for sentence, _ in piece) for piece in pieces]

    def _counted(self, sentences: Sequence[str], size: int) -> Iterator[tuple[str, int]]:
        """Yield sentences with their token counts, those above the size in windows."""
        for sentence, encoding in zip(sentences, self._encoded(sentences), strict=True):
            offsets = encoding.offsets
            for start in range(0, max(len(offsets), 1), size):
                window = offsets[start : start + size]
                whole = len(offsets) <= size
                cut = sentence if whole else sentence[window[0][0] : window[-1][1]]
                yield cut, len(window)

    def _kept(self, piece: Sequence[tuple[str, int]], room: int) -> list[tuple[str, int]]:
        """Return the last sentences of a piece that fit into the overlap and into the room."""
        kept: list[tuple[str, int]] = []
        left = min(self._overlap, room)
        for sentence, length in reversed(piece[1:]):
            if length > left:
                break
            kept.insert(0, (sentence, length))
            left -= length
        return kept

    def _by_headings(self, text: str) -> list[str]:
        """Make a piece of each section, headed by its heading; divide longer ones by
        sentences.
        """
        found = sections(_LEAD + text)
        pieces = []
        for number, (heading, body) in enumerate(found):
            head = f"{heading}\n" if number and has_content(heading) else ""
            whole = head + body
            if not has_content(body):
                if head:
                    pieces.append(heading)
                continue
            length, used = (len(one.ids) for one in self._encoded([whole, head]))
            if length <= self._size:
                pieces.append(whole)
                continue
            if used > self._size // 2:  # a heading that would leave little room
                head, used = "", 0
            pieces += [head + one for one in self._by_sentences(body, self._size - used)]
        return pieces
