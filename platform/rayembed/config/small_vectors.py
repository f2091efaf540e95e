"""Settings for searches in compressed vectors: number type and rescoring."""

from typing import Literal

from pydantic import PositiveInt, model_validator

from rayembed.config.settings import Settings

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
