"""Near-duplicates against comparing every text with every other by hand."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rayembed.data.engine.index import read_column
from rayembed.data.engine.parts import write_part
from rayembed.data.engine.work_items import Execute, in_process
from rayembed.data.hashes import text_hash
from rayembed.data.records import Record
from rayembed.data.words import normalised, words
from rayembed_extras.near_duplicates.find import (
    Removed,
    SimilarPairs,
    find_near_duplicates,
    removed_rows,
)
from rayembed_extras.near_duplicates.settings import NearDuplicates
from rayembed_extras.near_duplicates.signatures import band_keys, bands, pairs_of, shingles

CONFIG = NearDuplicates(threshold=0.7, ngram=3)


def texts_with_copies(count: int, seed: int) -> list[str]:
    """Texts of 12 to 60 words; a third are copies of others with some words changed."""
    rng = np.random.default_rng(seed)

    def word() -> str:
        return f"w{rng.integers(5000)}"

    texts = [[word() for _ in range(rng.integers(12, 60))] for _ in range(count * 2 // 3)]
    while len(texts) < count:
        copy = list(texts[rng.integers(len(texts))])
        for _ in range(rng.integers(0, 4)):
            copy[rng.integers(len(copy))] = word()
        texts.append(copy)
    return [" ".join(texts[i]) for i in rng.permutation(count)]


def records_of(texts: Sequence[str]) -> list[Record]:
    """A record of each text, half of its words in the query; every third has two positives."""
    made = []
    for i, text in enumerate(texts):
        split = text.split()
        half = len(split) // 2
        query, positive = " ".join(split[:half]), " ".join(split[half:])
        positives = (positive,)
        if i % 3 == 0:
            positives = (" ".join(split[half : half + 3]), " ".join(split[half + 3 :]))
        made.append(Record(f"d/{i}", query, positives, "d", origin=(f"file#{i}",)))
    return made


def grams(text: str, n: int) -> set[str]:
    found = re.findall(r"\w+", text.lower())
    return {" ".join(found[i : i + n]) for i in range(max(len(found) - n + 1, 1))}


def grams_of_pair(record: Record, n: int) -> set[str]:
    """N-grams of the query and of all positives, each marked by its side."""
    sides = [("query", record.query), *(("positive", text) for text in record.positives)]
    return {f"{side}: {gram}" for side, text in sides for gram in grams(text, n)}


def similarities(sets: Sequence[set[str]]) -> dict[tuple[int, int], float]:
    return {
        (i, j): len(sets[i] & sets[j]) / len(sets[i] | sets[j])
        for i, j in itertools.combinations(range(len(sets)), 2)
    }


def brute_force(sets: Sequence[set[str]], config: NearDuplicates, ids: Sequence[str]) -> set[str]:
    """Ids of rows to remove: of what similar pairs link all but that of the lowest hash."""
    groups = [{i} for i in range(len(sets))]
    for (i, j), similarity in similarities(sets).items():
        if similarity >= config.threshold and groups[i] is not groups[j]:
            groups[i] |= groups[j]
            for k in groups[j]:
                groups[k] = groups[i]
    gone = {i for i in range(len(sets)) if i != min(groups[i], key=lambda k: text_hash(ids[k]))}
    return {ids[i] for i in gone}


def find(
    folder: Path,
    records: Sequence[Record],
    rows_per_part: int,
    config: NearDuplicates = CONFIG,
    execute: Execute = in_process,
    keep: np.ndarray | None = None,
) -> set[str]:
    starts = range(0, len(records), rows_per_part)
    parts = [write_part(str(folder / "parts"), records[i : i + rows_per_part]) for i in starts]
    keep = np.ones(len(records), dtype=bool) if keep is None else keep
    writer: Any = SimpleNamespace(
        folder=str(folder), working_folder=str(folder / "working"), dataset="d"
    )
    ids = read_column(parts, "id_hash")
    found = find_near_duplicates(config, writer, parts, keep, ids, execute)
    return {records[i].id for i in found.positions}


def removed_of(
    folder: Path, pairs: np.ndarray, similarity: np.ndarray, ids: np.ndarray, size: int = 10**9
) -> Removed:
    """Removed rows of pairs that come so many at a time."""
    folder.mkdir()
    firsts = range(0, len(pairs), size)
    chunks = [
        SimilarPairs(n, pairs[first : first + size], similarity[first : first + size])
        for n, first in enumerate(firsts)
    ]
    return removed_rows(lambda: iter(chunks), ids, folder)


def listed(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "removed").to_pylist()


@pytest.mark.parametrize("seed", range(3))
def test_equals_comparing_all_with_all(seed: int, tmp_path: Path) -> None:
    texts = texts_with_copies(240, seed)
    records = records_of(texts)
    sets = [grams_of_pair(record, CONFIG.ngram) for record in records]
    wanted = brute_force(sets, CONFIG, [record.id for record in records])
    assert 20 < len(wanted) < 80
    strict = CONFIG.model_copy(update={"threshold": 0.9})
    assert wanted != brute_force(sets, strict, [record.id for record in records])
    found = find(tmp_path, records, 50)
    # No row goes without cause, and the bands miss few: 1.5 % of pairs at the very threshold.
    assert found <= wanted
    assert len(found) >= 0.97 * len(wanted)
    near = similarities(sets)
    place = {record.id: i for i, record in enumerate(records)}
    rows = listed(tmp_path)
    assert {row["id"] for row in rows} == found
    assert len(rows) == len(found)
    for row in rows:
        i, j = place[row["id"]], place[row["matched"]]
        assert row["similarity"] == pytest.approx(near[min(i, j), max(i, j)], abs=1e-6)
        assert (row["query"], row["positive"]) == (records[i].query, records[i].positives[0])
        assert row["matched_text"] == "\n".join((records[j].query, *records[j].positives))
        assert (row["reason"], row["origin"]) == ("near-duplicate", [f"file#{i}"])


def test_neither_parts_nor_order_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = records_of(texts_with_copies(200, 7))
    first = find(tmp_path / "a", records, 200)
    assert first
    assert find(tmp_path / "b", records[::-1], 23) == first
    # Many buckets and many tasks that compare.
    monkeypatch.setattr("rayembed_extras.near_duplicates.find._BANDS_PER_BUCKET", 300)
    monkeypatch.setattr("rayembed_extras.near_duplicates.find.PAIRS_COMPARED", 60)
    assert find(tmp_path / "c", records, 41) == first
    one, many = (sorted(listed(tmp_path / at), key=lambda row: row["id"]) for at in "ac")
    assert one == many
    assert len(list((tmp_path / "c" / "removed").iterdir())) > 1


def test_a_kill_changes_nothing_and_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    records = records_of(texts_with_copies(150, 3))
    whole = find(tmp_path / "a", records, 40)
    calls = []

    def dies(task, units, needs):
        for number, unit in enumerate(units):
            if number == 1:
                raise KeyboardInterrupt
            calls.append(unit)
            yield task(unit)

    for _ in range(40):
        try:
            found = find(tmp_path / "b", records, 40, execute=dies)
        except KeyboardInterrupt:
            continue
        break
    assert found == whole
    assert len(calls) > 8
    calls.clear()
    assert find(tmp_path / "b", records, 40, execute=dies) == whole
    assert not calls


def test_query_or_positive_alone_and_rows_that_are_gone_already(tmp_path: Path) -> None:
    same, other = "one two three four five six", "seven eight nine ten eleven twelve"
    records = [
        Record("d/0", same, ("alpha beta gamma delta epsilon",), "d"),
        Record("d/1", same, ("zeta eta theta iota kappa",), "d"),
        Record("d/2", "quite another question here", (other,), "d"),
        Record("d/3", "and this is a third one", (other.upper() + "!",), "d"),
    ]
    for of, pair in (("query", {"d/0", "d/1"}), ("positive", {"d/2", "d/3"}), ("pair", set())):
        config = CONFIG.model_copy(update={"of": of})
        found = find(tmp_path / of, records, 2, config)
        assert len(found) == len(pair) // 2
        assert found <= pair
    config = CONFIG.model_copy(update={"of": "query"})
    keep = np.array([True, False, True, True])
    assert find(tmp_path / "gone", records, 2, config, keep=keep) == set()


@pytest.mark.parametrize("of", ["pair", "positive"])
def test_a_row_with_another_answer_is_no_copy(of: str, tmp_path: Path) -> None:
    texts = [" ".join(f"{name}{i}" for i in range(30)) for name in "qabcd"]
    query, first, *others = texts
    answers = [(first, others[0]), (first, others[1]), (others[0], first), (first,)]
    records = [Record(f"d/{i}", query, one, "d") for i, one in enumerate(answers)]
    found = find(tmp_path, records, 2, CONFIG.model_copy(update={"of": of}))
    assert len(found) == 1
    assert found < {"d/0", "d/2"}


def test_a_text_a_thousand_times_is_linear_and_leaves_one(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).permutation(1000)
    pairs = pairs_of(np.zeros(1000, dtype=np.int64), ids, np.arange(1000))
    assert len(pairs) < 10 * 1000
    gone = removed_of(tmp_path / "scratch", pairs, np.ones(len(pairs), np.float32), ids).positions
    assert sorted(set(range(1000)) - set(gone.tolist())) == [int(np.argmin(ids))]
    records = [
        Record(f"d/{i}", "the same text again and again", ("x y z",), "d") for i in range(60)
    ]
    assert len(find(tmp_path, records, 13)) == 59


def test_pairs_of_few_rows_are_all_pairs() -> None:
    key = np.array([5, 1, 5, 2, 5, 1])
    ids = np.array([30, 10, 20, 0, 40, 5])
    assert pairs_of(key, ids, np.arange(6)).tolist() == [[0, 4], [2, 0], [2, 4], [5, 1]]
    assert pairs_of(key[:0], ids[:0], key[:0]).shape == (0, 2)


def test_the_nearest_pair_is_told(tmp_path: Path) -> None:
    similar = np.array([[0, 1], [1, 2], [0, 2]])
    ids, similarity = np.array([1, 2, 3]), np.array([0.8, 0.9, 0.9], np.float32)
    found = removed_of(tmp_path / "a", similar, similarity, ids)
    assert found.positions.tolist() == [1, 2]
    assert found.pair.tolist() == [1, 2]  # row 2 is as near to 0 as to 1; 0 has the lower hash
    assert found.side.tolist() == [0, 1]
    none = removed_of(tmp_path / "b", np.empty((0, 2), np.int64), similarity[:0], ids)
    assert none.positions.tolist() == []


@pytest.mark.parametrize("size", [1, 7, 10**9])
def test_components_and_nearest_pairs_equal_a_walk_over_the_graph(
    size: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(size)
    every = np.array(list(itertools.combinations(range(120), 2)))
    pairs = rng.permutation(every[rng.random(len(every)) < 0.008])
    swapped = rng.random(len(pairs)) < 0.5
    pairs[swapped] = pairs[swapped, ::-1]
    ids = rng.integers(-20, 20, 120)  # with equal ones
    similarity = rng.integers(8, 11, len(pairs)).astype(np.float32) / 10
    near: dict[int, list[tuple[float, int, int, int]]] = {}
    for number, (a, b) in enumerate(pairs.tolist()):
        for row, other in ((a, b), (b, a)):
            near.setdefault(row, []).append((-similarity[number], ids[other], other, number))
    wanted, seen = {}, set()
    for start in near:
        component, waiting = set(), [start]
        while waiting:
            row = waiting.pop()
            if row not in component:
                component.add(row)
                waiting += [other for _, _, other, _ in near[row]]
        if start not in seen:
            seen |= component
            stays = min(component, key=lambda row: (ids[row], row))
            wanted |= {row: min(near[row])[3] for row in component if row != stays}
    found = removed_of(tmp_path / "scratch", pairs, similarity, ids, size)
    assert len(wanted) > 20
    assert found.positions.tolist() == sorted(wanted)
    number = found.task.astype(np.int64) * size + found.pair if size < 10**9 else found.pair
    assert number.tolist() == [wanted[row] for row in sorted(wanted)]
    assert (pairs[number, found.side] == found.positions).all()


def test_bands_find_most_pairs_at_the_threshold() -> None:
    for threshold in (0.5, 0.8, 0.95, 1.0):
        config = NearDuplicates(threshold=threshold)
        number, width = bands(config)
        assert number * width <= config.permutations
        assert 1 - (1 - threshold**width) ** number > 0.95


def test_share_of_equal_bands_is_as_the_formula_says() -> None:
    """Signatures are no worse than independent hash functions."""
    rng = np.random.default_rng(0)
    config = NearDuplicates(threshold=0.8, ngram=1)
    width = bands(config)[1]
    texts = []
    for i in range(200):
        common = [f"c{i}x{j}" for j in range(60)]
        for side in "ab":
            own = [f"{side}{i}x{j}" for j in range(10)]
            texts.append(" ".join(rng.permutation(common + own)))
    keys = band_keys(shingles(texts, config.ngram), config)
    similarity = 60 / 80
    share = float((keys[::2] == keys[1::2]).mean())
    assert share == pytest.approx(similarity**width, abs=0.03)  # three standard deviations
    assert (keys[::2] == np.roll(keys[1::2], 1, axis=0)).mean() == 0


@pytest.mark.parametrize("words_a_side", [3, 8, 20, 30, 60, 150])
@pytest.mark.parametrize("of", ["pair", "query", "positive"])
def test_the_other_direction_of_a_pair_is_no_near_duplicate(of, words_a_side, tmp_path) -> None:
    rng = np.random.default_rng(words_a_side)

    def text() -> str:
        return " ".join(f"w{number}" for number in rng.integers(10**6, size=words_a_side))

    pairs = [(text(), text()) for _ in range(30)]
    both = [side for a, b in pairs for side in ((a, b), (b, a))]
    rows = [Record(f"d/{i}", a, (b,), "d") for i, (a, b) in enumerate(both)]
    config = NearDuplicates(of=of)
    assert find(tmp_path / "both", rows, 13, config) == set()
    # The control: a copy in the same direction goes, whichever it is.
    copies = [*rows, *(Record(f"c/{i}", a, (b,), "d") for i, (a, b) in enumerate(both))]
    assert len(find(tmp_path / "copies", copies, 13, config)) == len(rows)


def test_words_and_ngrams() -> None:
    assert words("The  Ｃafé, don't_stop!") == ["the", "café", "don", "t_stop"]
    assert words("东京 Tower 2") == ["东", "京", "tower", "2"]
    assert words("❤") == ["❤"]
    assert normalised(" A\tB\u00a0 c\n") == "a b c"
    found = shingles(["a b c d", "b c d", "a", "", "d c b a"], 3)
    assert np.diff(found.first).tolist() == [2, 1, 1, 1, 2]
    assert found.of(0)[1] == found.of(1)[0]
    assert len(set(found.hashes.tolist())) == 6, "order matters, and no two others are equal"
    assert (
        shingles(["a b", "b a"], 1).of(0).tolist()
        == shingles(["a b", "b a"], 1).of(1)[::-1].tolist()
    )
