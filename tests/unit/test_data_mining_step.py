"""The mining step: what is done again and what is not, the audit, documents of its own."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import mining_by_hand as by_hand
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dies_once import innermost
from mining_step import configured, dataset_of, mine, prepared, told
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder as SentenceCrossEncoder
from tiny_models import save_cross_encoder, save_encoder
from transformers import RobertaConfig, RobertaForSequenceClassification

from rayembed.config.mining import CrossEncoder
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.parts import read_records
from rayembed.data.mining.counts import histogram
from rayembed.data.mining.mine import make_mined
from rayembed.data.mining.rescoring import check_cross_encoder, load_cross_encoder
from rayembed.data.records import Negative
from rayembed.data.sources.tasks import HELD_OUT_TEXT, HeldOut
from rayembed.data.vectors.teacher import (
    TeacherLoader,
    weights_of,
)
from rayembed.data.words import normalised_hash
from rayembed.errors import ArtifactError, AssetError, DataError
from rayembed.machine.hardware import Precision
from rayembed.models import versions

RULE = {"kind": "top_k_perc_pos", "max_relative_score": 0.8}


def test_a_second_run_does_nothing_and_another_teacher_of_the_name_mines_anew(tmp_path) -> None:
    rows = by_hand.made_up_rows(20, 0)
    before = prepared(tmp_path, rows, 2)
    done: list[str] = []

    def counting(weights: str, meaning: str) -> PipelineContext:
        def execute(task, units, needs):
            for unit in units:
                done.append(type(innermost(task)).__name__)
                yield task(unit)

        def load(config, weights, device):
            return lambda texts, role: by_hand.vectors_of(texts, meaning)

        teacher_loader = TeacherLoader(load, lambda reference: weights)
        return PipelineContext(str(tmp_path / "out"), 0, execute, teacher_loader)

    first = make_mined(counting("old", "a"), dataset_of(configured()), before, HeldOut())
    assert sorted(set(done)) == ["EmbedPart", "MineParts"]
    done.clear()
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    assert make_mined(counting("old", "a"), dataset_of(configured()), before, HeldOut()) == first
    assert not done
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == stamps
    other = make_mined(counting("new", "b"), dataset_of(configured()), before, HeldOut())
    assert sorted(done) == ["EmbedPart", "EmbedPart", "MineParts", "MineParts"]
    assert other.folder != first.folder
    negatives = {n.teacher for p in other.parts for r in read_records(p.path) for n in r.negatives}
    assert negatives == {"new"}
    # Another rule takes the vectors that are there.
    done.clear()
    make_mined(
        counting("old", "a"), dataset_of(configured(rule={"kind": "top_k"})), before, HeldOut()
    )
    assert done == ["MineParts", "MineParts"]


def test_other_libraries_are_one_warning_and_remake_nothing(tmp_path, monkeypatch, caplog) -> None:
    before, done = prepared(tmp_path, by_hand.made_up_rows(20, 0), 2), list[str]()

    def execute(task, units, needs):
        for unit in units:
            done.append(type(innermost(task)).__name__)
            yield task(unit)

    def mined(**changes):
        done.clear()
        caplog.clear()
        monkeypatch.setattr(versions, "_warned", set())  # as of a job that is started again
        loader = TeacherLoader(by_hand.load, lambda reference: "w")
        context = PipelineContext(str(tmp_path / "out"), 0, execute, loader)
        made = make_mined(context, dataset_of(configured(**changes)), before, HeldOut())
        return made, [message for message in caplog.messages if "other library versions" in message]

    first, told = mined()
    assert (len(done), told) == (4, [])
    was = first.manifest["versions"]
    assert {"torch", "transformers", "tokenizers"} <= was.keys()
    (record,) = (tmp_path / "out/data/vectors").glob("*/versions.json")
    assert json.loads(record.read_text())["versions"] == was
    real = versions.version
    other = {"transformers": "99.0"}
    monkeypatch.setattr(versions, "version", lambda name: other.get(name) or real(name))
    again, told = mined()
    assert (again.folder, again.manifest, done) == (first.folder, first.manifest, [])
    assert len(told) == 1
    assert f"(transformers {was['transformers']}, here 99.0) and are used unchanged" in told[0]
    # Another rule takes the vectors of both parts, with one warning for all of them.
    ruled, told = mined(rule={"kind": "top_k"})
    assert (done, len(told)) == (["MineParts", "MineParts"], 1)
    assert ruled.manifest["versions"] == was | other
    monkeypatch.setattr("rayembed.data.mining.mine.VECTORS", "raised")
    assert mined()[0].folder != first.folder


def test_vectors_that_are_there_are_not_made_again(tmp_path) -> None:
    rows = by_hand.made_up_rows(20, 0, given=True)
    calls: list[int] = []

    def load(config, weights, device):
        calls.append(1)
        return by_hand.load(config, weights, device)

    context = PipelineContext(
        str(tmp_path / "out"),
        0,
        teacher_loader=TeacherLoader(load, lambda r: "w"),
    )
    before = prepared(tmp_path, rows, 2)
    for changes, loaded in (({}, 2), ({"rule": {"kind": "top_k"}}, 0), ({"pool": "given"}, 2)):
        calls.clear()
        make_mined(context, dataset_of(configured(**changes)), before, HeldOut())
        assert len(calls) == loaded


def test_the_audit_counts_what_was_refused_and_chosen(tmp_path) -> None:
    rows = by_hand.made_up_rows(40, 5, labels=True)
    config = configured(rule=RULE, near_duplicate=0.5, candidates=30, skip=2)
    found, manifest = mine(tmp_path, rows, config, 3)
    one_part, manifest_of_one = mine(tmp_path / "one", rows, config, 1)
    assert one_part == found
    for name in ("refused", "histograms", "mining_examples", "candidates", "mined", "short"):
        assert manifest[name] == manifest_of_one[name], name
    assert manifest["candidates"] == 40 * 30
    assert manifest["refused"]["skipped rank"] == 40 * 2
    assert set(manifest["refused"]) >= {"a positive", "of the query's class", "by the rule"}
    histograms = manifest["histograms"][0]
    assert sum(histograms["positive"]) == 40
    assert sum(histograms["negative"]) == manifest["mined"]
    assert sum(histograms["refused_by_rule"]) == manifest["refused"]["by the rule"]
    assert len(manifest["mining_examples"]) == 20
    by_query = {r.query: r for r in found}
    for one in manifest["mining_examples"]:
        assert [n["text"] for n in one["negatives"]] in [
            [n.text for n in r.negatives] for r in found if r.query == one["query"]
        ]
        limit = by_hand.limit(config.rule, one["positive_score"])
        assert all(refused["score"] > limit for refused in one["refused"])
        assert one["query"] in by_query
    assert any(one["refused"] for one in manifest["mining_examples"])


def test_what_the_driver_holds_of_a_part_is_small_and_without_texts(tmp_path) -> None:
    rows = by_hand.made_up_rows(60, 5)
    results = []

    def execute(task, units, needs):
        for unit in units:
            timed = task(unit)
            results.append(timed["result"])
            yield timed

    others = [{"teacher": "b"}]
    _, manifest = mine(
        tmp_path, rows, configured(rule=RULE, further_teachers=others), 2, execute=execute
    )
    assert len(manifest["mining_examples"]) == 20
    mined = [json.dumps(result) for result in results if "mined" in result]
    assert len(mined) == 2
    for content in mined:
        assert not any(word in content for word in by_hand.WORDS)
        assert len(content) < 3000
    (folder,) = (tmp_path / "out/data/mined").iterdir()
    assert not (folder / "working").exists()


def test_histograms_have_bins_of_two_hundredths() -> None:
    counts = histogram(np.array([-1.2, -1.0, -0.001, 0.0, 0.019, 0.03, 0.999, 1.0005]))
    assert len(counts) == 100
    assert {place: n for place, n in enumerate(counts) if n} == {0: 2, 49: 1, 50: 2, 51: 1, 99: 2}


def write_corpus(folder: Path, texts: list[str]) -> None:
    """The texts in files of three kinds, with a title that is a column of its own."""
    folder.mkdir(parents=True)
    cells = [{"title": text.split(" ", 1)[0], "rest": text.split(" ", 1)[1]} for text in texts]
    third = len(texts) // 3
    lines = [json.dumps(row) for row in cells[:third]]
    (folder / "a.jsonl").write_text("\n".join(lines))
    frame = pa.Table.from_pylist(cells[third : 2 * third])
    pq.write_table(frame, folder / "b.parquet", row_group_size=3)
    with (folder / "c.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["title", "rest"])
        writer.writeheader()
        writer.writerows(cells[2 * third :])


@pytest.mark.parametrize("per_part", [5, 1000])
@pytest.mark.parametrize("rule", [{"kind": "top_k"}, RULE], ids=["top_k", "perc_pos"])
def test_documents_of_their_own_are_mined_from_too(rule, per_part, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("rayembed.data.mining.documents._DOCUMENTS_PER_PART", per_part)
    rows = by_hand.made_up_rows(25, 0, labels=True)
    positives = list(dict.fromkeys(t for r in rows for t in r.positives))
    more = by_hand.made_up_texts(30, 99) + positives[:5] + [rows[0].query]
    more = list(dict.fromkeys(more)) + more[:4]  # some twice
    write_corpus(tmp_path / "in" / "corpus", more)
    config = configured(
        rule=rule, near_duplicate=0.5, corpus={"path": "corpus", "text": "title+rest"}
    )
    assert by_hand.mined(rows, config, more) != by_hand.mined(rows, config), "nothing of it counts"
    for parts in (1, 3):
        found, manifest = mine(tmp_path, rows, config, parts, root=str(tmp_path / "in"))
        assert told(found) == by_hand.mined(rows, config, more)
    (documents,) = (tmp_path / "out/data/documents").iterdir()
    made = json.loads((documents / "manifest.json").read_text())
    assert made["rows_in"] == len(more)
    assert made["rows_out"] + sum(made["rejected"].values()) == len(more)
    # What the files hold decides, not where they lie.
    moved = configured(
        rule=rule, near_duplicate=0.5, corpus={"path": "moved", "text": "title+rest"}
    )
    (tmp_path / "in/corpus").rename(tmp_path / "in/moved")
    _, again = mine(tmp_path, rows, moved, 3, root=str(tmp_path / "in"))
    assert again == manifest
    write_corpus(tmp_path / "in" / "corpus", more[:-6])
    _, other = mine(tmp_path, rows, config, 3, root=str(tmp_path / "in"))
    assert other["fingerprint"] != manifest["fingerprint"]


def test_rows_without_a_document_are_counted_and_too_many_refused(tmp_path) -> None:
    rows = by_hand.made_up_rows(10, 0)
    good = [{"texts": [f"first {i}", f"second {i}"]} for i in range(299)]
    bad = [{"texts": " "}, {"texts": 7}, {"other": "x"}]
    path = tmp_path / "corpus.jsonl"
    config = configured(corpus={"path": str(path), "text": "texts"})
    path.write_text("\n".join(map(json.dumps, [*good, *bad[:2], good[0]])))
    mine(tmp_path, rows, config)
    (documents,) = (tmp_path / "out/data/documents").iterdir()
    made = json.loads((documents / "manifest.json").read_text())
    assert made["rejected"] == {
        "column 'texts' is neither a text nor a list of texts": 1,
        "duplicate": 1,
        "no text": 1,
    }
    assert (made["rows_in"], made["rows_out"]) == (302, 598)
    path.write_text("\n".join(map(json.dumps, [*good[:200], *bad])))
    with pytest.raises(DataError, match="3 of 203 rows have no document in column 'texts'"):
        mine(tmp_path, rows, config)
    path.write_text(json.dumps(bad[0]))
    with pytest.raises(DataError, match="has no documents in its 1 rows: 1 × no text"):
        mine(tmp_path, rows, config)


def test_what_is_held_out_is_no_negative(tmp_path) -> None:
    rows = by_hand.made_up_rows(10, 0)
    texts = by_hand.made_up_texts(40, 99)
    out, alone, title = texts[3], texts[4], "Kept Title"
    cells = [{"title": None, "text": text} for text in texts]
    cells[4] = {"title": "Any", "text": f" {alone} "}
    cells[5]["title"] = title
    cells[6]["text"] = [texts[6], out]
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, cells)))

    def negatives(held_out: HeldOut, column: str = "title+text") -> tuple[set[str], dict]:
        config = configured(
            rule={"kind": "top_k"},
            near_duplicate=None,
            candidates=80,
            num_negatives=80,
            corpus={"path": str(path), "text": column},
        )
        found, manifest = mine(tmp_path, rows, config, held_out=held_out)
        return {n.text for r in found for n in r.negatives}, manifest

    free, all_of_them = negatives(HeldOut())
    wanted = {*texts[:4], f"Any  {alone} ", f"{title} {texts[5]}", *texts[6:]}
    assert wanted <= free
    held = HeldOut(texts=frozenset(map(normalised_hash, (out.upper(), alone, title))))
    kept, manifest = negatives(held)
    assert manifest["fingerprint"] != all_of_them["fingerprint"]
    # Of a row that joins columns all goes.
    assert wanted - kept == {out, f"Any  {alone} ", f"{title} {texts[5]}", texts[6]}
    kept, _ = negatives(held, "text")
    assert kept.isdisjoint({out, f" {alone} "})
    assert {*texts[:3], *texts[5:]} <= kept
    made = [
        json.loads((folder / "manifest.json").read_text())
        for folder in (tmp_path / "out/data/documents").iterdir()
    ]
    # Of 40 rows; they do not count as bad ones.
    assert sorted(one["rejected"].get(HELD_OUT_TEXT, 0) for one in made) == [0, 2, 4]


@pytest.mark.parametrize("pool", ["corpus", "given"])
def test_a_part_without_rows_stays_one(pool, tmp_path) -> None:
    rows = by_hand.made_up_rows(3, 0, given=True)
    found, manifest = mine(tmp_path, rows, configured(pool=pool), 4)
    assert told(found) == by_hand.mined(rows, configured(pool=pool))
    assert [rows for _, rows in manifest["parts"]] == [1, 1, 1, 0]


@pytest.mark.parametrize("pool", ["corpus", "given"])
def test_a_killed_step_goes_on_and_ends_the_same(pool, tmp_path) -> None:
    rows = by_hand.made_up_rows(30, 2, labels=True, given=True)
    write_corpus(tmp_path / "corpus", by_hand.made_up_texts(20, 7))
    files = {"path": str(tmp_path / "corpus"), "text": "title+rest"} if pool == "corpus" else None
    others = [{"teacher": "b"}]
    config = configured(pool=pool, corpus=files, further_teachers=others)
    whole, _ = mine(tmp_path / "whole", rows, config, 3)
    total = 0
    for _ in range(40):
        left = 1

        def dies(task, units, needs):
            nonlocal left, total
            for unit in units:
                if not left:
                    raise KeyboardInterrupt
                left -= 1
                total += 1
                yield task(unit)

        try:
            found, _ = mine(tmp_path / "killed", rows, config, 3, execute=dies)
            break
        except KeyboardInterrupt:
            assert not list((tmp_path / "killed/out/data/mined").rglob("manifest.json"))
    assert found == whole
    # 3 parts: vectors by two teachers, given negatives or 3 files of documents by both; mining.
    assert total == (3 * 2 + 3 + 3 * 2 + 3 if pool == "corpus" else 3 * 2 + 3 * 2 + 3)


def test_a_step_goes_on_in_the_number_type_that_it_was_begun_in(tmp_path) -> None:
    rows, config = by_hand.made_up_rows(20, 0), configured(further_teachers=[{"teacher": "b"}])
    assert config.dtype == "auto"
    types: list[str] = []

    def load(teacher, weights, device):
        types.append(teacher.dtype)
        return by_hand.load(teacher, weights, device)

    def make(dtype: str, left: int):
        def execute(task, units, needs):
            nonlocal left
            for unit in units:
                if not left:
                    raise KeyboardInterrupt
                left -= 1
                yield task(unit)

        loader = TeacherLoader(load, lambda reference: reference, lambda: Precision(dtype, "so"))
        context = PipelineContext(str(tmp_path / "out"), 0, execute, loader)
        return make_mined(context, dataset_of(config), before, HeldOut())

    before = prepared(tmp_path, rows, 2)
    with pytest.raises(KeyboardInterrupt):
        make("bfloat16", 3)
    made = make("float32", 100)  # on a machine without units for bfloat16
    assert set(types) == {"bfloat16"}
    assert [teacher["dtype"] for teacher in made.manifest["teachers"]] == ["bfloat16"] * 2
    # What is finished is not done again on that machine; what begins there takes its type.
    assert make("float32", 0) == replace(made, reused=True)
    shutil.rmtree(made.folder)
    assert make("float32", 100).manifest["teachers"][0]["dtype"] == "float32"


def test_a_cross_encoder_from_a_folder(tmp_path) -> None:
    folder = str(save_cross_encoder(tmp_path / "reranker"))
    rows = by_hand.made_up_rows(12, 4)
    reranker = {"model": folder, "max_length": 24, "dtype": "float32"}
    config = configured(rescoring=reranker, rule={"kind": "top_k"}, candidates=12)
    found, _ = mine(tmp_path, rows, config)
    model = SentenceCrossEncoder(folder, max_length=24, device="cpu")
    for record in found:
        pairs = [(record.query, negative.text) for negative in record.negatives]
        scores = 1 / (1 + np.exp(-model.predict(pairs, activation_fn=torch.nn.Identity())))
        kept = [negative.cross_score for negative in record.negatives]
        assert kept == pytest.approx(scores.tolist(), abs=1e-5)
        assert kept == sorted(kept, reverse=True)
        assert [n.score for n in record.negatives] != kept
    # A limit that half of the candidates pass decides by these scores.
    middle = float(np.median([n.cross_score for r in found for n in r.negatives]))
    rule = {"kind": "top_k_abs", "max_score": middle}
    limited, manifest = mine(tmp_path, rows, configured(rescoring=reranker, rule=rule))
    scores = [n.cross_score for r in limited for n in r.negatives]
    assert max(scores) <= middle
    assert manifest["refused"]["by the rule"] > 0


def test_other_weights_of_a_name_are_loaded_anew(tmp_path) -> None:
    rows = by_hand.made_up_rows(6, 4)
    config = configured(rescoring={"model": str(tmp_path / "reranker")}, rule={"kind": "top_k"})
    teacher_loader = TeacherLoader(by_hand.load, lambda ref: ref if ref == "a" else weights_of(ref))
    before, scores = prepared(tmp_path, rows, 1), []
    made = [save_cross_encoder(tmp_path / f"seed {seed}", seed=seed) for seed in (0, 1)]
    for folder in (made[0], made[1], made[0]):
        shutil.rmtree(tmp_path / "reranker", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "reranker")
        storage = str(tmp_path / f"out {len(scores)}")
        context = PipelineContext(storage, 0, teacher_loader=teacher_loader)
        done = make_mined(context, dataset_of(config), before, HeldOut())
        found = [record for part in done.parts for record in read_records(part.path)]
        scores.append([n.cross_score for record in found for n in record.negatives])
    assert scores[0] == scores[2] != scores[1]


def test_a_cross_encoder_with_several_outputs_is_refused(tmp_path) -> None:
    folder = str(save_cross_encoder(tmp_path / "classes", num_labels=3))
    config = configured(rescoring={"model": folder})
    with pytest.raises(AssetError, match="gives 3 numbers for a pair"):
        mine(tmp_path, by_hand.made_up_rows(5, 0), config)


def test_a_model_that_is_no_cross_encoder_is_refused(tmp_path) -> None:
    """transformers would give either a classifier with random weights."""
    encoder = save_encoder(tmp_path / "encoder")
    with pytest.raises(
        AssetError, match=r"ForSequenceClassification; this model has the architecture BertModel"
    ):
        check_cross_encoder(encoder, "encoder")
    headless = save_cross_encoder(tmp_path / "headless")
    weights = load_file(headless / "model.safetensors")
    kept = {name: w for name, w in weights.items() if not name.startswith("classifier")}
    save_file(kept, headless / "model.safetensors", metadata={"format": "pt"})
    config = configured(rescoring={"model": str(headless)})
    with pytest.raises(AssetError, match=r"lacks classifier\.bias, classifier\.weight"):
        mine(tmp_path, by_hand.made_up_rows(5, 0), config)
    check_cross_encoder(save_cross_encoder(tmp_path / "whole"), "whole")
    plain = tmp_path / "bin"
    shutil.copytree(tmp_path / "whole", plain)
    (plain / "model.safetensors").unlink()
    torch.save(load_file(tmp_path / "whole/model.safetensors"), plain / "pytorch_model.bin")
    check_cross_encoder(plain, "plain")
    (plain / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(AssetError, match="cannot be read"):
        check_cross_encoder(plain, "plain")


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_pairs_longer_than_the_positions_of_a_cross_encoder_are_cut(family, tmp_path) -> None:
    folder = save_cross_encoder(tmp_path / family)
    if family == "roberta":  # 66 positions, of which two are never used
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
        config = RobertaConfig(
            vocab_size=200, num_attention_heads=4, num_labels=1, max_position_embeddings=66, **sizes
        )
        RobertaForSequenceClassification(config).save_pretrained(folder)
    settings = CrossEncoder(model=str(folder))
    assert settings.max_length > 64
    score = load_cross_encoder(settings, family)
    long, cut = "the red fox " * 60, "the red fox " * 30
    found = score([("red", long), ("red", cut)])
    assert np.isfinite(found).all()
    assert found[0] == pytest.approx(found[1], abs=1e-6), "both fill the positions"


def test_a_cross_encoder_that_gives_nan_is_refused(tmp_path) -> None:
    folder = save_cross_encoder(tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["classifier.bias"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = configured(rescoring={"model": str(folder)})
    with pytest.raises(DataError, match=r"broken' gives scores such as nan for .* pairs"):
        mine(tmp_path, by_hand.made_up_rows(5, 0), config)


@pytest.mark.parametrize("pool", ["corpus", "given", "documents"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_teacher_that_gives_numbers_that_are_none_is_refused(pool, number, tmp_path) -> None:
    rows = by_hand.made_up_rows(6, 3)
    rows[4] = replace(rows[4], negatives=(Negative("a negative of its own"),))
    wanted = {
        "corpus": rows[2].positives[0],
        "given": "a negative of its own",
        "documents": "a document of its own",
    }[pool]

    def load(config, weights, device):
        encode = by_hand.load(config, weights, device)

        def broken(texts, role):
            vectors = encode(texts, role)
            vectors[[text == wanted for text in texts], 0] = number
            return vectors

        return broken

    changes = {"pool": "given"} if pool == "given" else {}
    if pool == "documents":
        (tmp_path / "c.jsonl").write_text(json.dumps({"text": wanted}) + "\n")
        changes = {"corpus": {"path": str(tmp_path / "c.jsonl"), "text": "text"}}
    context = PipelineContext(
        str(tmp_path / "out"),
        0,
        teacher_loader=TeacherLoader(load, lambda ref: ref),
    )
    dataset, before = dataset_of(configured(**changes)), prepared(tmp_path, rows, 1)
    with pytest.raises(DataError, match=r"teacher 'a' .* NaN or infinity for 1 of") as error:
        make_mined(context, dataset, before, HeldOut())
    assert repr(wanted) in str(error.value)
    assert not list((tmp_path / "out").rglob("manifest.json")) or pool == "documents"


@pytest.mark.parametrize("name", ["queries.npy", "documents.npy", "index.npz"])
def test_broken_and_missing_files_of_vectors(name, tmp_path) -> None:
    rows = by_hand.made_up_rows(6, 3)
    whole, _ = mine(tmp_path, rows, configured())
    (path,) = (tmp_path / "out/data/vectors").rglob(f"*.{name}")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    shutil.rmtree(tmp_path / "out/data/mined")
    with pytest.raises(ArtifactError, match=rf"{name}' is broken: .*Remove the file"):
        mine(tmp_path, rows, configured())
    path.unlink()
    again, _ = mine(tmp_path, rows, configured())
    assert told(again) == told(whole)
    assert path.read_bytes() == content


def test_the_log_tells_what_was_found_and_warns_where_it_is_next_to_nothing(
    tmp_path, caplog, monkeypatch
) -> None:
    caplog.set_level("INFO")
    rows = by_hand.made_up_rows(12, 4)
    _, manifest = mine(tmp_path / "some", rows, configured(rule={"kind": "top_k"}))
    assert manifest["mined"] > 0
    told = f"data set d: mined {manifest['mined']} hard negatives; {manifest['short']} of 12 rows "
    assert [m for m in caplog.messages if m.startswith(told)]
    assert not [r for r in caplog.records if r.levelname == "WARNING"]

    def alike(config, weights, device):
        return lambda texts, role: np.ones((len(texts), 1), dtype=np.float32)

    monkeypatch.setattr(by_hand, "load", alike)
    none = configured(rule={"kind": "top_k_abs", "max_score": 0.5})
    _, manifest = mine(tmp_path / "none", rows, none)
    assert manifest["mined"] == 0
    share = round(100 * manifest["refused"]["by the rule"] / manifest["candidates"])
    assert share > 50
    told = (
        "data set d: mined 0 hard negatives; 12 of 12 rows have fewer negatives than requested and "
        "12 rows have none; "
        f"the mining rule refused {share} %"
    )
    assert [m for m in caplog.messages if m.startswith(told)]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "more than half of the rows have no mined negative (refused candidates: " in warning
