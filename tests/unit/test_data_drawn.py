"""Small sources and settings by chance, against a plain second implementation of all steps."""

import json
import logging
import random
import re
from pathlib import Path
from typing import Any

import mining_by_hand as by_hand
import plain_data as plain
import pytest
from mining_step import told

from rayembed.config.data_run import data_of
from rayembed.config.mining import CleaningConfig
from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed.data.engine import parts as parts_module
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import read_records
from rayembed.data.epochs import with_expected_steps, with_planned_steps
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.prepare import prepare, prepare_datasets
from rayembed.data.vectors.teacher import TeacherLoader
from rayembed.recipes.catalogue import get_recipe

log = logging.getLogger(__name__)

GROUPS = 9
NEAR = {"threshold": 0.8, "ngram": 2}
CAN_BE_NEAR = "near_duplicates" in CleaningConfig.model_fields
"""Whether the package that removes near-duplicates is here."""


def teachers() -> TeacherLoader:
    return TeacherLoader(by_hand.load, lambda reference: f"weights of {reference}")


def varied(rng: random.Random, text: str) -> str:
    """The text in another case or with other white space."""
    return rng.choice(
        [text.upper(), f" {text}", f"{text}\n", text.replace(" ", "  "), text.title()]
    )


def rows_by_chance(rng: random.Random, count: int, name: str) -> list[dict[str, Any]]:
    """Rows of long random texts: copies, near-copies, other cases, empty cells, shared texts."""

    def text() -> str:
        return " ".join(f"w{rng.randrange(10**6)}" for _ in range(40))

    documents = [text() for _ in range(count)]
    queries = [text() for _ in range(count)]
    rows: list[dict[str, Any]] = []
    for i in range(count):
        positives = [documents[i], *rng.sample(documents, rng.choice([0, 0, 1, 2]))]
        negatives = rng.sample(documents, rng.choice([0, 1, 3])) + [queries[0]] * (i % 5 == 0)
        if rng.random() < 0.3:
            negatives.append(varied(rng, rng.choice([queries[i], documents[i]])))
        row = {"query": queries[i], "positive": positives, "negatives": negatives}
        row |= {"id": f"{name}{i}", "group": f"g{rng.randrange(GROUPS)}"}
        rows.append(row)
        chance = rng.random()
        if chance < 0.1:
            rows.append(dict(row))
        elif chance < 0.2:  # one word of eighty is another one
            words = documents[i].split()
            words[rng.randrange(40)] = "another"
            rows.append(row | {"positive": [" ".join(words)], "negatives": []})
        elif chance < 0.3:
            rows.append(row | {"query": varied(rng, queries[i]), "positive": [text()]})
        elif chance < 0.4:
            rows.append(row | {"query": text(), "positive": [varied(rng, documents[i])]})
        elif chance < 0.46:
            rows.append(row | rng.choice([{"query": " "}, {"positive": [""]}]))
        elif chance < 0.5:
            rows.append(row | {"positive": [row["query"]]})
    rng.shuffle(rows)
    return rows


def settings_by_chance(rng: random.Random, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Settings of a data set, as overrides."""
    groups = sorted({row["group"] for row in rows})
    held_out = [
        None,
        {"kind": "fraction", "share": 0.3},
        {"kind": "fraction", "share": 0.9, "max_queries": 11},
        {"kind": "groups", "column": "group", "share": 0.4},
        {"kind": "groups", "column": "group", "values": groups[:4]},
        {"kind": "ids", "column": "id", "values": sorted({row["id"] for row in rows})[:15]},
    ]
    mining = {"teacher": "a", "num_negatives": 3, "candidates": 20, "rule": {"kind": "top_k"}}
    rules = [{"kind": "top_k"}, {"kind": "top_k_perc_pos"}, {"kind": "top_k_margin_pos"}]
    return {
        "held_out": rng.choice(held_out),
        "source.both_directions": rng.random() < 0.3,
        "source.negatives": "negatives",
        "num_samples": rng.choice([None, None, 25]),
        **({"cleaning.near_duplicates": rng.choice([None, NEAR])} if CAN_BE_NEAR else {}),
        "mining": rng.choice([None, mining | {"rule": rng.choice(rules)}]),
    }


def draw(folder: Path, seed: int) -> None:
    """Prepare sources by chance, and compare everything that has a definition."""
    rng = random.Random(seed)
    rows = {name: rows_by_chance(rng, rng.randrange(36, 50), name) for name in ("a", "b")}
    # A text of the one data set stands in the other, which must not train it when it is held out.
    for _ in range(5):
        rng.choice(rows["b"])["negatives"].append(rng.choice(rows["a"])["query"])
        rng.choice(rows["b"])["query"] = rng.choice(rows["a"])["query"]
        rng.choice(rows["b"])["negatives"].append(varied(rng, rng.choice(rows["a"])["query"]))
        rng.choice(rows["b"])["positive"] = [varied(rng, rng.choice(rows["a"])["positive"][0])]
    given = {name: settings_by_chance(rng, of) for name, of in rows.items()}
    epochs, batch = rng.choice([1, 1, 2, 3.5]), rng.choice([4, 7])
    weights = {"a": 1.0, "b": rng.choice([1.0, 3.0])}
    source = {"kind": "pairs", "path": "x", "max_rejected_share": 1.0}
    datasets = [{"name": name, "source": source} for name in rows]
    run = get_recipe("biencoder")
    stage = run.stages[0].model_dump(mode="json") | {"datasets": weights, "epochs": epochs}
    stage["batch"] |= {"global_pairs": batch, "num_negatives": 2}
    values = run.model_dump(mode="json")
    values |= {"data": {"datasets": datasets}, "stages": [stage], "seed": seed % 3}
    values["evaluation"] |= {"guard": None, "benchmarks": []}
    for dataset in datasets:
        dataset["source"] = source | {"path": f"{folder}/{dataset['name']}.jsonl"}
    for name, of in rows.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in of)
        (folder / f"{name}.jsonl").write_text(lines)
    base = parse(type(run), _with_negatives(values))
    run = override(base, [
        f"data.datasets.{name}.{path}={value if isinstance(value, str) else json.dumps(value)}"
        for name, settings in given.items() for path, value in settings.items()
    ])  # fmt: skip
    context = PipelineContext(str(folder / "out"), run.seed, teacher_loader=teachers())
    plans = prepare(run, context)
    chains = prepare_datasets(data_of(run), context)
    texts = {name: _held_out(chains[name][0], rows[name], given[name]) for name in rows}
    held_out = texts["a"] | texts["b"]
    final = {name: _check_records(chains[name], rows[name], given[name], held_out) for name in rows}
    _check_plan(run, plans["finetune"], final, weights, epochs, batch)
    done = with_planned_steps(run, plans)
    assert done.fingerprint == run.fingerprint == with_expected_steps(run).fingerprint


def _with_negatives(values: dict[str, Any]) -> dict[str, Any]:
    for dataset in values["data"]["datasets"]:
        dataset["source"] |= {"negatives": "negatives"}
    return values


def _held_out(
    made: DatasetArtifact, rows: list[dict[str, Any]], settings: dict[str, Any]
) -> set[str]:
    """Texts of a data set's held-out part, after a check that they are as many as asked for."""
    if settings["held_out"] is None:
        assert "held_out" not in made.manifest
        return set()
    asked = settings["held_out"]
    part = Path(made.folder).parents[1] / "held_out"
    (folder,) = part.glob(f"{made.manifest['inputs']['settings']['name']}-*/beir")

    def read(name: str) -> set[str]:
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        found = {plain.same(json.loads(line)["text"]) for line in lines}
        assert len(found) == len(lines), "texts that are one stand there twice"
        return found

    documents, queries = read("corpus"), read("queries")
    usable: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        of_row, _ = plain.records_of(row)
        if not isinstance(of_row, str):
            usable.setdefault((row["group"], row["id"]), []).append(of_row[0])
    firsts = [one for of in usable.values() for one in of]
    if asked["kind"] == "fraction":
        every = {plain.same(text) for one in firsts for text in one[1]}
        number = min(round(asked["share"] * len(every)), asked.get("max_queries", 1000))
        assert len(documents) == number
        held = [one for one in firsts if {plain.same(text) for text in one[1]} & documents]
        every = {plain.same(one[0]) for one in held}
        assert queries <= every
        assert len(queries) == min(len(every), asked.get("max_queries", 1000))
    else:
        place = 0 if asked["kind"] == "groups" else 1
        of_name: dict[str, list[Any]] = {}
        for key, of in usable.items():
            of_name.setdefault(key[place], []).extend(of)
        chosen = {
            name
            for name, of in of_name.items()
            if all({plain.same(text) for text in one[1]} <= documents for one in of)
            and {plain.same(one[0]) for one in of} <= queries
        }
        if "share" in asked:
            assert len(chosen) >= max(1, round(asked["share"] * len(of_name)))
        else:
            assert set(asked["values"]) & set(of_name) <= chosen
            own = [one for name in set(asked["values"]) & set(of_name) for one in of_name[name]]
            assert {plain.same(text) for one in own for text in one[1]} == documents
            assert {plain.same(one[0]) for one in own} == queries
        held = [
            one
            for one in firsts
            if plain.same(one[0]) in queries and {plain.same(text) for text in one[1]} & documents
        ]
    return {text for one in held for text in plain.texts_of(one)}


def _check_records(
    chain: list[DatasetArtifact],
    rows: list[dict[str, Any]],
    settings: dict[str, Any],
    held_out: set[str],
) -> dict[str, Any]:
    """Check the records of a data set and what is mined; its final records by name."""
    records = [r for part in chain[0].parts for r in read_records(part.path)]
    found = [(r.query, r.positives, tuple(n.text for n in r.negatives)) for r in records]
    wanted, counts = plain.left_of(rows, held_out, settings["source.both_directions"])
    manifest = chain[0].manifest
    kept_out = ("held out", "has a held-out text")
    rejected = {k: v for k, v in manifest["rejected"].items() if k not in kept_out}
    assert rejected == {
        reason: counts[reason]
        for reason in ("no query", "no positive", "positive equals query")
        if counts[reason]
    }
    assert sum(manifest["rejected"].get(k, 0) for k in kept_out) == counts["held out"]
    assert manifest["rows_in"] == len(rows)
    assert manifest["records_made"] == counts["made"]
    assert manifest.get("negatives_copied", 0) == counts["copied"]
    groups = [{i} for i in range(len(wanted))]
    if settings.get("cleaning.near_duplicates"):
        groups = plain.groups_of_near_duplicates(wanted, NEAR["threshold"], NEAR["ngram"])
    number = len(groups) if settings["num_samples"] is None else min(25, len(groups))
    place = {record: i for i, record in enumerate(wanted)}
    assert len({*found}) == len(found) == number == manifest["rows_out"]
    assert {*found} <= {*wanted}
    of_group = {i: k for k, group in enumerate(groups) for i in group}
    assert len({of_group[place[record]] for record in found}) == number
    assert not [text for record in found for text in plain.texts_of(record) if text in held_out]
    if settings["mining"] is not None:
        done = [r for part in chain[1].parts for r in read_records(part.path)]
        config = parse(type(get_mining(settings)), settings["mining"])
        assert told(done) == by_hand.mined(records, config)
        records = done
    return {record.id: record for record in records}


def get_mining(settings: dict[str, Any]) -> Any:
    from mining_step import configured

    return configured(**settings["mining"])


def _check_plan(
    run: Any,
    folder: str,
    final: dict[str, dict[str, Any]],
    weights: dict[str, float],
    epochs: float,
    batch: int,
) -> None:
    plan = BatchPlan.open(folder)
    assert plan.num_steps == plain.steps_of(epochs, sum(map(len, final.values())), batch)
    steps = [
        [(r.dataset, r.id, r.positives) for r in plan.read(step)] for step in range(plan.num_steps)
    ]
    assert {len(step) for step in steps} == {batch}
    every = {name: {r.id: r.positives for r in of.values()} for name, of in final.items()}
    trained = plain.check_plan(steps, every, weights)
    for name, drawn in plan.manifest["datasets"].items():
        assert drawn["rows"] == len(final[name])
        rows, counts = trained[name]
        assert drawn.get("positives") == (counts if counts["all"] > rows else None)
    for record in (r for step in range(0, plan.num_steps, 5) for r in plan.read(step)):
        whole = final[record.dataset][record.id]
        assert record.negatives == whole.negatives[:2]
        if whole.positive_score is not None:
            scores = whole.positive_scores or (whole.positive_score,)
            turn = whole.positives.index(record.positives[0])
            assert record.positive_score == scores[turn]


def _draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(parts_module, "ROWS_PER_PART", random.Random(seed).choice([7, 30, 1000]))
            try:
                draw(folder, seed)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("first", range(0, 12, 3))
def test_small_sources_by_chance_equal_the_definition(first, tmp_path, monkeypatch) -> None:
    _draws(tmp_path, monkeypatch, range(first, first + 3))


@pytest.mark.slow("300 draws take ten minutes")
def test_many_small_sources_by_chance_equal_the_definition(tmp_path, monkeypatch) -> None:
    _draws(tmp_path, monkeypatch, range(1000, 1300))


def test_the_reference_has_teeth() -> None:
    """Faults that the tests above would tell: a direction lost, a copy kept, a positive skipped."""
    pair = ("a b c d e f", ("g h i j k l",), ())
    reverse = (pair[1][0], (pair[0],), ())
    assert len(plain.groups_of_near_duplicates([pair, reverse], 0.8, 2)) == 2
    assert len(plain.groups_of_near_duplicates([pair, pair], 0.8, 2)) == 1
    assert plain.records_of({"query": "q", "positive": ["p"], "negatives": [" P", "n"]}) == (
        [("q", ("p",), ("n",))],
        1,
    )
    rows = {"a": {"x": ("1", "2")}}
    right = [[("a", "x", ("1", "2"))], [("a", "x", ("2", "1"))]]
    assert plain.check_plan(right, rows, {"a": 1.0}) == {"a": (1, {"all": 2, "trained": 2})}
    with pytest.raises(AssertionError, match=re.escape("not the positive of its turn")):
        plain.check_plan([right[0], right[0]], rows, {"a": 1.0})
    with pytest.raises(AssertionError, match="not equally often"):
        plain.check_plan(right, rows | {"a": rows["a"] | {"y": ("3",)}}, {"a": 1.0})
