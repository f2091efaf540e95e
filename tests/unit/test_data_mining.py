"""Positive-aware mining against a loop over all documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayembed.config.mining import MiningConfig, PercPos
from rayembed.data.mining.rules import highest_score
from rayembed.data.mining.tasks import MinePart
from rayembed.data.parts import Part, read_records, write_part
from rayembed.data.records import Negative, Record
from rayembed.data.vectors.embed import EmbedPart, PartUnit, Vectors

WORDS = [f"text{i}" for i in range(40)]
calls: list[tuple[str, int]] = []


def fake_vectors(texts, role="document") -> np.ndarray:
    """Small whole numbers by text: exact in float16, with many equal scores."""
    made = []
    for text in texts:
        rng = np.random.default_rng(sum(map(ord, text)) * 7 + len(text))
        made.append(rng.integers(-2, 3, 4))
    return np.array(made, dtype=np.float32).reshape(-1, 4)


def fake_teacher(config: MiningConfig, device: str):
    def encode(texts, role):
        calls.append((role, len(texts)))
        return fake_vectors(texts)

    return encode


def made_up(count: int, seed: int, labels: bool) -> list[Record]:
    rng = np.random.default_rng(seed)
    records = []
    for i in range(count):
        query, *positives = rng.choice(WORDS, 3, replace=False).tolist()
        given_ = [
            t for t in rng.choice(WORDS, i % 3, replace=False) if t not in (query, *positives)
        ]
        records.append(
            Record(
                id=str(i),
                query=query,
                positives=tuple(positives[: 1 + i % 2]),
                negatives=tuple(Negative(str(t)) for t in given_),
                dataset="d",
                label=str(rng.choice(["x", "y", "z"])) if labels and i % 4 else None,
            )
        )
    return records


def brute_force(records: list[Record], config: MiningConfig) -> list[list[tuple]]:
    """Negatives of each record by the rule, read from its definition."""
    documents = list(dict.fromkeys(t for r in records for t in r.positives))
    labels = {t: {r.label for r in records if t in r.positives and r.label} for t in documents}
    vectors = fake_vectors(documents)
    result = []
    for r in records:
        query = fake_vectors([r.query])[0]
        positive = float(query @ fake_vectors([r.positives[0]])[0])
        ranked = sorted((-float(query @ v), i) for i, v in enumerate(vectors))
        kept = [(n.text, None, None, "given", None) for n in r.negatives]
        room = config.num_negatives - len(kept)
        mined = []
        for rank, (minus, i) in enumerate(ranked[: config.candidates]):
            limit = positive - (1 - config.rule.max_relative_score) * abs(positive)
            text = documents[i]
            if -minus > limit or text == r.query or text in r.positives:
                continue
            if text in [n.text for n in r.negatives] or (r.label and r.label in labels[text]):
                continue
            mined.append((text, rank, -minus, "top_k_perc_pos", "abc"))
        result.append(kept + mined[: max(room, 0)])
    return result


def run_mining(folder: str, parts: list[Part], config: MiningConfig) -> list[Record]:
    embed = EmbedPart(Vectors(f"{folder}/vectors"), config, fake_teacher)
    for part in parts:
        assert embed(PartUnit(part))["rows_in"] == part.rows
    mine = MinePart(f"{folder}/mined", Vectors(f"{folder}/vectors"), tuple(parts), config, "abc")
    found = []
    for part in parts:
        result = mine(PartUnit(part))
        assert result["rows_in"] == result["rows_out"] == part.rows
        found += read_records(f"{folder}/mined/{result['parts'][0][0]}")
    return found


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), candidates=st.sampled_from([5, 100]), labels=st.booleans())
def test_equals_brute_force(seed, candidates, labels, tmp_path_factory) -> None:
    folder = str(tmp_path_factory.mktemp("mining"))
    records = made_up(50, seed, labels)
    config = MiningConfig(teacher="t", num_negatives=4, candidates=candidates)
    parts = [write_part(f"{folder}/p", records[i : i + 17]) for i in range(0, 50, 17)]
    mined = run_mining(folder, parts, config)
    assert [r.id for r in mined] == [r.id for r in records]
    expected = brute_force(records, config)
    for record, source, wanted in zip(mined, records, expected, strict=True):
        found = [(n.text, n.rank, n.score, n.rule, n.teacher) for n in record.negatives]
        assert found == wanted
        dot = float((fake_vectors([source.query]) * fake_vectors([source.positives[0]])).sum())
        assert record.positive_score == dot
    # Teeth: the rule of the positive keeps something out that plain top-k would take.
    loose = brute_force(
        records, config.model_copy(update={"rule": PercPos(max_relative_score=1.0)})
    )
    assert loose != expected or candidates == 5


def test_vectors_are_kept(tmp_path) -> None:
    part = write_part(str(tmp_path / "p"), made_up(20, 0, False))
    config = MiningConfig(teacher="t")
    embed = EmbedPart(Vectors(str(tmp_path / "v")), config, fake_teacher)
    first = embed(PartUnit(part))
    before = len(calls)
    assert embed(PartUnit(part)) == first
    assert len(calls) == before
    stored = sorted(p.suffixes[-2:] for p in (tmp_path / "v").iterdir())
    assert stored == [[".documents", ".npy"], [".index", ".npz"], [".queries", ".npy"]]
    assert np.load(next((tmp_path / "v").glob("*.queries.npy"))).dtype == np.float16


@pytest.mark.parametrize(
    ("positive", "limit"), [(0.8, 0.76), (0.0, 0.0), (-0.2, -0.21), (1.0, 0.95)]
)
def test_highest_score(positive: float, limit: float) -> None:
    assert highest_score(positive, 0.95) == pytest.approx(limit)
