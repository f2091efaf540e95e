"""Divide documents into the texts that are embedded: by tokens, sentences or headings."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rayembed.config.types import has_content
from rayembed.data.sources.structure import sections
from rayembed.data.words import split_sentences
from rayembed.errors import ConfigError
from rayembed.models.contract import PromptTokenizer
from rayembed_extras.indexing.settings import Chunks

Split = Callable[[Sequence[str]], list[list[str]]]
"""Function from documents to the pieces of each, in order; at least one piece each."""

Offsets = Sequence[tuple[int, int]]
"""First character of each token, and the one after its last."""

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

    def __call__(self, texts: Sequence[str]) -> list[list[str]]:
        if self._by == "tokens":
            encodings = self._encoded(texts)
            return [self._windows(*one) for one in zip(texts, encodings, strict=True)]
        if self._by == "sentences":
            return self._by_sentences(texts, [self._size] * len(texts))
        return self._by_headings(texts)

    def _encoded(self, texts: Sequence[str]) -> list[Any]:
        found: list[Any] = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return found

    def _windows(self, text: str, encoding: Any) -> list[str]:
        """Cut a text between words, or within one that alone is longer than the size."""
        offsets, words = encoding.offsets, encoding.word_ids
        pieces, start = [], 0
        while True:
            stop = min(start + self._size, len(offsets))
            if start == 0 and stop == len(offsets):
                return [text.strip()]
            stop = _between_words(words, stop, range(stop, start, -1))
            pieces.append(text[offsets[start][0] : offsets[stop - 1][1]].strip())
            if stop == len(offsets):
                return pieces
            begin = max(stop - self._overlap, start + 1)
            start = _between_words(words, begin, range(begin, stop + 1))

    def _by_sentences(self, texts: Sequence[str], sizes: Sequence[int]) -> list[list[str]]:
        """Divide each text into whole sentences, joined up to its size."""
        sentences = [split_sentences(text) for text in texts]
        encodings = iter(self._encoded([one for several in sentences for one in several]))
        return [
            self._joined([(one, next(encodings).offsets) for one in several], size)
            for several, size in zip(sentences, sizes, strict=True)
        ]

    def _joined(self, sentences: Sequence[tuple[str, Offsets]], size: int) -> list[str]:
        """Join whole sentences up to the size; a longer sentence is cut at token borders."""
        pieces: list[list[tuple[str, int]]] = [[]]
        filled = 0
        for sentence, offsets in sentences:
            for window, length in _windows_of(sentence, offsets, size):
                if pieces[-1] and filled + length > size:
                    pieces.append(self._kept(pieces[-1], size - length))
                    filled = sum(count for _, count in pieces[-1])
                pieces[-1].append((window, length))
                filled += length
        return [" ".join(sentence for sentence, _ in piece) for piece in pieces]

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

    def _by_headings(self, texts: Sequence[str]) -> list[list[str]]:
        """Make a piece of each section, headed by its heading; divide longer ones by
        sentences.
        """
        found = [
            (number, f"{heading}\n" if place and has_content(heading) else "", body)
            for number, text in enumerate(texts)
            for place, (heading, body) in enumerate(sections(_LEAD + text))
        ]
        lengths = [len(one.ids) for one in self._encoded([head + body for _, head, body in found])]
        heads = [len(one.ids) for one in self._encoded([head for _, head, _ in found])]
        long = [place for place, length in enumerate(lengths) if length > self._size]
        # A heading that would leave little room stands before no piece.
        used = {place: heads[place] if heads[place] <= self._size // 2 else 0 for place in long}
        bodies = [found[place][2] for place in long]
        parts = self._by_sentences(bodies, [self._size - used[place] for place in long])
        divided = dict(zip(long, parts, strict=True))
        pieces: list[list[str]] = [[] for _ in texts]
        for place, (number, head, body) in enumerate(found):
            before = head if used.get(place, 1) else ""
            pieces[number] += [(before + one).strip() for one in divided.get(place, [body])]
        return pieces


def _between_words(words: Sequence[int | None], place: int, places: Iterable[int]) -> int:
    """Return the first of some places between tokens that is not within a word; `place` if all
    are.
    """
    for one in places:
        if one == len(words) or words[one] is None or words[one] != words[one - 1]:
            return one
    return place


def _windows_of(sentence: str, offsets: Offsets, size: int) -> Iterator[tuple[str, int]]:
    """Yield a sentence with its number of tokens, or windows of one above the size."""
    if len(offsets) <= size:
        yield sentence, len(offsets)
        return
    for start in range(0, len(offsets), size):
        window = offsets[start : start + size]
        yield sentence[window[0][0] : window[-1][1]].strip(), len(window)
