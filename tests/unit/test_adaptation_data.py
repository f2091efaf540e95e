"""Texts to masked sequences: nothing is lost, shares are those asked for, workers do not show."""

import gzip
import json
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tiny_adaptation import ROWS, save_masked, tiny_adaptation, write_corpus

from rayembed.config.override import override
from rayembed.data.engine.artifacts import PipelineContext, open_artifact
from rayembed.data.engine.parts import read_table
from rayembed.data.engine.work_items import in_process
from rayembed.errors import ArtifactError, ConfigError, DataError, StorageError
from rayembed.models.tokens import pretrained_tokenizer
from rayembed_extras.adaptation.batch import MaskedSteps, mask
from rayembed_extras.adaptation.encoder import check_adaptable, vocabulary
from rayembed_extras.adaptation.make import _at_once, prepare_sequences
from rayembed_extras.adaptation.plan import SequencePlan, SequencePool, order_sequences
from rayembed_extras.adaptation.settings import MaskingConfig
from rayembed_extras.adaptation.texts import Text, read_texts
from rayembed_extras.adaptation.vocabulary import MaskingVocabulary
from rayembed_extras.adaptation.writer import SequenceWriter, packed, truncated

WORDS = MaskingVocabulary(
    prefix=(2,), suffix=(3,), mask_id=4, pad_id=0, special_ids=(0, 1, 2, 3, 4), num_words=200
)


def texts_of(*lengths):
    numbers = iter(range(10, 10_000))
    return [np.array([next(numbers) for _ in range(n)], dtype=np.int32) for n in lengths]


def test_packed_sequences_hold_all_tokens_in_order_with_an_end_between_texts():
    found, rest = packed(texts_of(3, 1, 4), WORDS, 6)
    assert [ids.tolist() for ids in found] == [[2, 10, 11, 12, 3, 3], [2, 13, 3, 14, 15, 3]]
    assert rest.tolist() == [16, 17]
    assert packed([], WORDS, 6) == ([], None)
    cut = truncated(texts_of(3, 1, 5), WORDS, 6)
    assert [ids.tolist() for ids in cut] == [
        [2, 10, 11, 12, 3],
        [2, 13, 3],
        [2, 14, 15, 16, 17, 3],
    ]


@pytest.mark.parametrize("lengths", [(3, 1, 4), (4, 4, 4), (9, 3), (1,) * 20])
def test_texts_that_come_one_by_one_are_packed_as_all_at_once(lengths):
    """Also where a text ends just where a sequence does, and nothing is left of it."""
    whole, left = packed(texts_of(*lengths), WORDS, 6)
    found, rest = [], None
    for text in texts_of(*lengths):
        made, rest = packed([text], WORDS, 6, rest)
        assert len(rest) < 4
        found += made
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in whole]
    assert rest.tolist() == left.tolist()


def test_masks_have_the_shares_of_the_settings_and_leave_special_tokens():
    ids = np.concatenate([[2], np.tile(np.arange(10, 190), 500), [3]]).astype(np.int32)
    found = mask(ids, MaskingConfig(), WORDS, seed=1, step=2, slot=3)
    assert len(found.places) / len(ids) == pytest.approx(0.3, abs=0.005)
    seen = found.input_ids[found.places]
    np.testing.assert_array_equal(found.words, ids[found.places])
    assert (seen == WORDS.mask_id).mean() == pytest.approx(0.8, abs=0.01)
    # One random word in 200 is the right one.
    stays = seen == found.words
    assert stays.mean() == pytest.approx(0.1 + 0.1 / 200, abs=0.01)
    random = seen[~stays & (seen != WORDS.mask_id)]
    assert len(random) / len(seen) == pytest.approx(0.1, abs=0.01)
    assert set(random.tolist()) >= set(range(10, 200))
    assert not {0, len(ids) - 1} & set(found.places.tolist())
    untouched = np.setdiff1d(np.arange(len(ids)), found.places)
    np.testing.assert_array_equal(found.input_ids[untouched], ids[untouched])
    assert ids[1] == 10  # the given sequence stays as it is


def test_masks_are_those_of_seed_step_and_slot_alone():
    ids = np.arange(10, 110, dtype=np.int32)

    def places(seed=1, step=2, slot=3):
        found = mask(ids, MaskingConfig(), WORDS, seed=seed, step=step, slot=slot)
        return found.places.tolist()

    assert places() == places()
    others = [places(seed=9), places(step=9), places(slot=9)]
    assert all(other != places() for other in others)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_languages_are_drawn_in_proportion_to_their_sequences_to_the_power_alpha(alpha):
    sizes, steps, batch = {"en": 4000, "fr": 500, "sw": 60}, 40, 64
    language = np.repeat(np.arange(3, dtype=np.int32), list(sizes.values()))
    hashes = np.random.default_rng(0).permutation(len(language)).astype(np.int64)
    order, _ = order_sequences(SequencePool(hashes, language, list(sizes)), batch, steps, 3, alpha)
    weights = np.array(list(sizes.values())) ** alpha
    wanted = weights / weights.sum() * batch
    for number, expected in enumerate(wanted):
        counts = (language[order] == number).sum(axis=1)
        assert np.abs(counts.cumsum() - expected * np.arange(1, steps + 1)).max() < 1
    # No sequence twice in a batch, and none again before all others of its language came.
    assert all(len(set(step.tolist())) == batch for step in order)
    drawn = order[language[order] == 2][: sizes["sw"]].tolist()
    assert len(set(drawn)) == len(drawn) > 20


def test_the_order_is_that_of_the_contents_wherever_they_lie():
    language = np.array([0] * 50 + [1] * 30, dtype=np.int32)
    hashes = np.random.default_rng(1).permutation(80).astype(np.int64)
    there = np.random.default_rng(2).permutation(80)
    here, _ = order_sequences(SequencePool(hashes, language, ["a", "b"]), 8, 12, 3, 0.3)
    shuffled = SequencePool(hashes[there], language[there], ["a", "b"])
    moved, _ = order_sequences(shuffled, 8, 12, 3, 0.3)
    np.testing.assert_array_equal(hashes[here], hashes[there][moved])
    other, _ = order_sequences(SequencePool(hashes, language, ["a", "b"]), 8, 12, 4, 0.3)
    assert (other != here).mean() > 0.5


def test_a_language_too_small_for_its_share_of_a_batch_is_named():
    language = np.array([0] * 50 + [1] * 3, dtype=np.int32)
    pool = SequencePool(np.arange(53, dtype=np.int64), language, ["en", "sw"])
    with pytest.raises(DataError, match=r"'sw' has 3 sequences, .* takes up to 5"):
        order_sequences(pool, 16, 2, 0, 0.3)


def test_what_is_held_out_is_never_trained_on_and_has_the_shares_of_a_batch():
    language = np.array([0] * 60 + [1] * 30, dtype=np.int32)
    hashes = np.random.default_rng(1).permutation(90).astype(np.int64)
    hashes[59] = hashes[0]  # the same sequence twice
    pool = SequencePool(hashes, language, ["a", "b"])
    trained, kept = order_sequences(pool, 8, 40, 3, 0.3, held_out=3)
    assert (trained.shape, kept.shape) == ((40, 8), (3, 8))
    assert not set(hashes[trained.ravel()].tolist()) & set(hashes[kept.ravel()].tolist())
    whole, nothing = order_sequences(pool, 8, 40, 3, 0.3)
    assert nothing.shape == (0, 8)
    assert set(hashes[whole.ravel()].tolist()) >= set(hashes[kept.ravel()].tolist()), "the control"
    assert len(set(kept.ravel().tolist())) == kept.size
    drawn = (language[kept] == 1).mean(), (language[trained] == 1).mean()
    assert drawn[0] == pytest.approx(drawn[1], abs=0.05)


def test_of_a_language_that_would_lose_more_than_half_nothing_is_held_out(caplog):
    language = np.array([0] * 60 + [1] * 7, dtype=np.int32)
    pool = SequencePool(np.arange(67, dtype=np.int64), language, ["en", "sw"])
    trained, kept = order_sequences(pool, 8, 40, 3, 0.3, held_out=3)
    assert set(language[kept].ravel().tolist()) == {0}
    assert "for a held-out part get no score: sw" in caplog.text
    assert set(trained[language[trained] == 1].tolist()) == set(range(60, 67))
    with pytest.raises(DataError, match="held_out=null"):
        order_sequences(pool, 8, 40, 3, 0.3, held_out=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    save_masked(folder / "bert")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def plan(folder):
    run = tiny_adaptation(folder)
    storage = str(folder / "outputs")
    with pytest.MonkeyPatch.context() as patch:
        # Small files, so that steps lie in several of them.
        patch.setattr("rayembed_extras.adaptation.plan.ROWS_PER_FILE", 25)
        return SequencePlan.open(prepare_sequences(run, PipelineContext(storage, run.seed)))


@pytest.fixture(scope="module")
def compressed(folder, tmp_path_factory):
    """The corpus in one file, which no task can share with another."""
    texts = tmp_path_factory.mktemp("compressed")
    files = sorted((folder / "texts").iterdir())
    content = b"".join(file.read_bytes() for file in files)
    (texts / "all.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))
    return texts


MOST = 500
"""Tokens of a part, below."""


def made_of(folder, storage, texts, layout="packed"):
    """The folder of sequences and the fingerprint of the plan."""
    settings = [f"corpus.texts.made-up.source.path={texts}", f"corpus.layout={layout}"]
    run = override(tiny_adaptation(folder), settings)
    plan = SequencePlan.open(prepare_sequences(run, PipelineContext(str(storage), run.seed)))
    (made,) = (storage / "data" / "sequences").iterdir()
    return open_artifact(str(made)), plan.fingerprint


def sequences_of(made):
    """Of each language its sequences in the order of the parts."""
    found = {}
    for part in made.parts:
        table = read_table(part.path)
        assert len(table) == part.rows
        for code, ids in zip(
            *(table[n].to_pylist() for n in ("language", "input_ids")), strict=True
        ):
            found.setdefault(code, []).append(ids)
    return found


@pytest.fixture
def held(monkeypatch):
    """Tokens that wait in a task's memory, after each time that it took some texts."""
    counts = []
    take = SequenceWriter.take

    def told(writer, language, texts):
        take(writer, language, texts)
        sequences = [ids for found in writer.waiting.values() for ids in found]
        counts.append(sum(map(len, [*sequences, *writer.rest.values()])))

    monkeypatch.setattr(SequenceWriter, "take", told)
    return counts


@pytest.mark.parametrize("layout", ["packed", "truncated"])
def test_a_file_of_any_size_is_made_in_bounded_memory(
    folder, compressed, tmp_path, monkeypatch, held, layout
):
    whole, plan = made_of(folder, tmp_path / "whole", compressed, layout)
    at_once = max(held)
    held.clear()
    monkeypatch.setattr("rayembed_extras.adaptation.writer.TOKENS_PER_PART", MOST)
    monkeypatch.setattr("rayembed_extras.adaptation.make._TEXTS_AT_ONCE", 8)
    parted, again = made_of(folder, tmp_path / "parted", compressed, layout)
    # Of each of three languages less than a sequence of 32 waits beside the part.
    assert max(held) < MOST + 3 * 32
    assert len(parted.parts) > 10
    assert sequences_of(parted) == sequences_of(whole)
    assert parted.manifest["languages"] == whole.manifest["languages"]
    assert again == plan
    # The control: one part holds all but the last texts, more than ten times as much.
    assert len(whole.parts) == 1
    assert at_once > 10 * MOST


def test_sequences_show_where_texts_are_parted(folder, compressed, tmp_path):
    """The control of the test above: two files are packed one by one."""
    assert sequences_of(made_of(folder, tmp_path / "one", compressed)[0]) != sequences_of(
        made_of(folder, tmp_path / "two", "texts")[0]
    )


def test_texts_are_tokenised_together_up_to_a_number_of_characters(monkeypatch):
    monkeypatch.setattr("rayembed_extras.adaptation.make._CHARACTERS_AT_ONCE", 10)
    monkeypatch.setattr("rayembed_extras.adaptation.make._TEXTS_AT_ONCE", 3)
    texts = [Text("a" * length, "en") for length in (4, 5, 99, 1, 1, 1, 1, 10, 2)]
    found = list(_at_once(texts))
    assert [[len(text.text) for text in some] for some in found] == [
        [4, 5, 99],
        [1, 1, 1],
        [1, 10],
        [2],
    ]


def test_a_task_that_dies_leaves_whole_parts_and_makes_the_same_again(
    folder, compressed, tmp_path, monkeypatch
):
    monkeypatch.setattr("rayembed_extras.adaptation.writer.TOKENS_PER_PART", MOST)
    monkeypatch.setattr("rayembed_extras.adaptation.make._TEXTS_AT_ONCE", 8)

    def dies(*arguments):
        yield from islice(read_texts(*arguments), 200)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rayembed_extras.adaptation.make.read_texts", dies)
        with pytest.raises(KeyboardInterrupt):
            made_of(folder, tmp_path, compressed)
    (left,) = (tmp_path / "data" / "sequences").iterdir()
    files = list((left / "parts").iterdir())
    assert len(files) > 5
    assert all(len(read_table(str(file))) for file in files)
    assert not (left / "manifest.json").exists()
    again, _ = made_of(folder, tmp_path, compressed)
    assert {file.name for file in files} < {part.name for part in again.parts}
    assert {part.name for part in again.parts} == {f.name for f in (left / "parts").iterdir()}


def steps_of(plan, folder, worker=0, num_workers=1, seed=5):
    run = tiny_adaptation(folder)
    words = check_adaptable(folder / "bert", run.model)
    return MaskedSteps(plan, run.masking, words, seed, worker, num_workers)


def test_rows_are_counted_and_all_tokens_are_in_the_sequences(plan, folder):
    (made,) = (folder / "outputs" / "data" / "sequences").iterdir()
    manifest = open_artifact(str(made)).manifest
    assert manifest["rows_in"] == sum(ROWS.values()) + 2
    assert manifest["rejected"] == {"no language": 1, "no text": 1}
    assert {code: told["texts"] for code, told in manifest["languages"].items()} == ROWS
    backend = pretrained_tokenizer(folder / "bert").backend_tokenizer
    tokens = Counter()
    for path in (folder / "texts").iterdir():
        for row in map(json.loads, path.read_text().splitlines()):
            if row["text"].strip() and row["language"]:
                ids = backend.encode(row["text"], add_special_tokens=False).ids
                tokens[row["language"]] += len(ids)
    told = {one["language"]: one for one in plan.language_counts}
    assert {code: one["tokens"] for code, one in told.items()} == dict(tokens)
    weights = {code: one["sequences"] ** 0.3 for code, one in told.items()}
    for code, one in told.items():
        wanted = weights[code] / sum(weights.values())
        assert one["drawn_share"] == pytest.approx(wanted, abs=0.5 / 12)
        assert one["share"] == pytest.approx(
            one["sequences"] / sum(o["sequences"] for o in told.values()), abs=1e-5
        )


def test_workers_have_slices_of_the_same_masked_batches(plan, folder):
    whole = steps_of(plan, folder)
    for num_workers in (2, 4):
        parts = [steps_of(plan, folder, worker, num_workers) for worker in range(num_workers)]
        for step in range(plan.num_steps):
            one, several = whole(step), [part(step) for part in parts]
            for name in ("input_ids", "places", "words"):
                expected = getattr(one, name)
                found = [row for part in several for row in getattr(part, name)]
                assert len(found) == len(expected) == 12
                for a, b in zip(found, expected, strict=True):
                    np.testing.assert_array_equal(a, b)
            languages = np.concatenate([part.language for part in several])
            np.testing.assert_array_equal(languages, one.language)
    other = steps_of(plan, folder, seed=6)(0)
    assert any((a != b).any() for a, b in zip(other.input_ids, whole(0).input_ids, strict=True))
    with pytest.raises(DataError, match="a number of workers that divides 12"):
        steps_of(plan, folder, 0, 5)(0)


def test_held_out_batches_have_masks_of_their_own_whatever_the_training_has(plan, folder):
    run = tiny_adaptation(folder)
    words, exam = check_adaptable(folder / "bert", run.model), run.training.held_out.masking
    assert exam != run.masking
    make = MaskedSteps(plan, run.masking, words, run.seed, 0, 1, exam)
    other = MaskedSteps(plan, MaskingConfig(probability=0.9), words, run.seed, 0, 1, exam)
    assert len(plan.held_out) == 2
    for number, step in enumerate(plan.held_out):
        mine, theirs = make(step), other(step)
        assert [p.tolist() for p in mine.places] == [p.tolist() for p in theirs.places]
        ids, _ = plan.read(step, plan.slots(0, 1))
        drawn = [
            mask(row, exam, words, seed=run.seed, step=-1 - number, slot=slot).places.tolist()
            for slot, row in enumerate(ids)
        ]
        assert [p.tolist() for p in mine.places] == drawn, "by its own number, not by the step"
    trained = [one(0).places[0].tolist() for one in (make, other)]
    assert trained[0] != trained[1], "the control"


def test_a_lost_file_of_held_out_batches_is_told_before_training(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("rayembed_extras.adaptation.plan.ROWS_PER_FILE", 24)  # two steps a file
    run = tiny_adaptation(folder)
    context = PipelineContext(str(tmp_path), run.seed)
    place = Path(prepare_sequences(run, context))
    assert SequencePlan.open(str(place)).num_steps % 2 == 0
    (place / "steps-000000004.parquet").unlink()
    with pytest.raises(ArtifactError, match="is missing"):
        prepare_sequences(run, context)


def test_a_plan_made_elsewhere_or_after_a_kill_is_the_same(plan, folder, tmp_path, monkeypatch):
    run, tasks = tiny_adaptation(folder), []

    def dies(task, units, needs="cpu"):
        for result in in_process(task, units, needs):
            tasks.append(type(task.task).__name__)
            if len(tasks) == 3:
                raise KeyboardInterrupt
            yield result

    with pytest.raises(KeyboardInterrupt):
        prepare_sequences(run, PipelineContext(str(tmp_path), run.seed, dies))
    # Nor do tasks of another size show.
    monkeypatch.setattr("rayembed_extras.adaptation.plan._TOKENS_OF_A_TASK", 200)
    again = SequencePlan.open(prepare_sequences(run, PipelineContext(str(tmp_path), run.seed)))
    assert again.fingerprint == plan.fingerprint
    assert again.language_counts == plan.language_counts
    other = override(run, ["seed=6"])
    assert (
        SequencePlan.open(prepare_sequences(other, PipelineContext(str(tmp_path), 6))).fingerprint
        != plan.fingerprint
    )


def test_scratch_that_could_not_be_removed_goes_with_the_next_try(
    plan, folder, tmp_path, monkeypatch
):
    run = tiny_adaptation(folder)

    def fails(path):
        raise StorageError("it does not answer")

    with monkeypatch.context() as patch:
        patch.setattr("rayembed.assets.store.remove_folder", fails)
        place = Path(prepare_sequences(run, PipelineContext(str(tmp_path), run.seed)))
    assert list(place.glob("working/scattered*"))
    assert prepare_sequences(run, PipelineContext(str(tmp_path), run.seed)) == str(place)
    assert sorted({path.name.partition("-")[0] for path in place.iterdir()}) == [
        "manifest.json",
        "steps",
    ]
    assert SequencePlan.open(str(place)).fingerprint == plan.fingerprint


def test_wrong_corpora_are_told(folder, tmp_path):
    def prepare(*assignments):
        run = override(tiny_adaptation(folder), assignments)
        return prepare_sequences(run, PipelineContext(str(tmp_path), run.seed))

    source = "corpus.texts.made-up.source"
    with pytest.raises(ConfigError, match=r"source\.text = 'txt'.*did you mean 'text'"):
        prepare(f"{source}.text=txt")
    with pytest.raises(DataError, match=r"2 of 326 rows .*max_rejected_share=0\.001"):
        prepare(f"{source}.max_rejected_share=0.001")
    with pytest.raises(ConfigError, match=r"max_length is 2, but special tokens alone take 2"):
        prepare("corpus.max_length=2")
    with pytest.raises(DataError, match="there are no rows"):
        prepare(f"{source}.path=nothing")
    with pytest.raises(ConfigError, match="set exactly one of them"):
        override(tiny_adaptation(folder), ["corpus.texts.made-up.language=en"])
    with pytest.raises(ConfigError, match=r"placement\.grad_cache has no effect"):
        override(tiny_adaptation(folder), ["placement.grad_cache=false"])
    with pytest.raises(ConfigError, match="use a multiple"):
        override(tiny_adaptation(folder), ["placement.workers=5"])


def test_a_tokenizer_with_more_words_than_the_model_is_refused(folder):
    with pytest.raises(ArtifactError, match="words, but the model has only 3 word vectors"):
        vocabulary(folder / "bert", 3)
