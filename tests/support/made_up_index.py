"""Small indexes of made-up documents, for tests of `rayembed index`."""

import json
import random
from contextlib import contextmanager
from pathlib import Path

import pytest

from rayembed.config.settings import parse
from rayembed_extras.indexing import embed
from rayembed_extras.indexing.build import build_index
from rayembed_extras.indexing.settings import IndexRun

WORDS = ("dogs", "live", "in", "ancient", "places", "paris", "is", "the", "capital", "foxes")


def documents(number, *, start=0):
    """Documents of a few words, all different."""
    return [
        {
            "id": f"d{i}",
            "text": " ".join(WORDS[(i * (j + 3) + j) % 10] for j in range(2 + i % 9)) + f" {i}",
            "year": 1900 + i,
            "lang": "en" if i % 2 else None,
        }
        for i in range(start, start + number)
    ]


def sentences(number):
    """Documents of two sentences, the first of which can stand as a query."""
    chance = random.Random(0)
    rows = documents(number)
    for i, row in enumerate(rows):
        first, second = (" ".join(chance.choice(WORDS) for _ in range(6)) for _ in range(2))
        row["text"] = f"{first}. {second} {i}."
    return rows


def write(path, rows):
    """JSONL of rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def settings(folder, model, path, **changes):
    """Settings of an index with parts of ten documents; `changes` by path with `__` for dots."""
    values = {
        "name": "docs",
        "model": {"reference": str(model), "dtype": "float32"},
        "documents": {"path": str(path), "metadata": ["year", "lang"]},
        "rows_per_part": 10,
        "placement": {"storage_path": str(folder), "runtime": "local"},
    }
    for key, value in changes.items():
        *groups, last = key.split("__")
        group = values
        for name in groups:
            group = group.setdefault(name, {})
        group[last] = value
    return parse(IndexRun, values)


def rows_of(made):
    """All rows of an index's table by id, with vectors as lists."""
    store = made.open()
    return {row["id"]: row for table in store.scan(made.table) for row in table.to_pylist()}


def build(run, **options):
    """Build an index and read its rows; see `build_index`."""
    made = build_index(run, **options)
    return made, rows_of(made)


class Counted:
    """Counts the texts that models embed, in place of `LoadedModel.encode`."""

    def __init__(self, monkeypatch):
        self.texts = []
        plain = embed.LoadedModel.encode

        def encode(loaded, texts):
            self.texts += texts
            return plain(loaded, texts)

        monkeypatch.setattr(embed.LoadedModel, "encode", encode)


def ledger_files(folder, name="docs"):
    """Names of the ledger's files of the first table."""
    return sorted(Path(folder, "indexes", name, f"{name}_1", "ledger").iterdir())


class _Killed(BaseException):
    """What a kill leaves undone."""


@contextmanager
def dies(monkeypatch, owner, name, call, *, after=False):
    """Raise before or after a call of a function."""
    plain_function, calls = getattr(owner, name), []

    def dying(*given, **more):
        calls.append(given)
        if len(calls) == call and not after:
            raise _Killed
        made = plain_function(*given, **more)
        if len(calls) == call:
            raise _Killed
        return made

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, dying)
        with pytest.raises(_Killed):
            yield
