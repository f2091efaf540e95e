"""Inputs of each kind of task, and scores of outputs that were made up for them."""

import numpy as np
import pytest
import transformers
from made_up_benchmarks import CONTEXT, answers
from tiny_models import save_encoder, save_nomic

from rayembed.errors import ArtifactError
from rayembed_papers.backbone.catalogue import FINETUNINGS
from rayembed_papers.backbone.heads import IGNORED
from rayembed_papers.backbone.kinds import work_of
from rayembed_papers.backbone.tokens import BackboneTokenizer

LENGTH = 24
LONG = "dogs are larger than cats and " + CONTEXT + " and so do the cats and dogs" * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return BackboneTokenizer(folder, LENGTH)


def answered(**by_name):
    """A model that gives these outputs, one after the other, whatever the inputs are."""

    def predict(inputs, collate):
        collate(inputs)
        count = len(inputs)
        return [{name: values[n] for name, values in by_name.items()} for n in range(count)]

    return predict


def test_pairs_are_what_transformers_makes_of_them(folder, tokenizer):
    work = work_of(FINETUNINGS["RTE"], tokenizer)
    rows = [("are cats larger", "dogs live there", 1), ("where", "the quick brown fox", 0)]
    batch = work.collate(work.training_inputs(rows))
    plain = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = plain(
        *([row[place] for row in rows] for place in (0, 1)),
        padding=True,
        return_tensors="pt",
        return_token_type_ids=True,
    )
    for name in ("input_ids", "token_type_ids", "attention_mask"):
        assert batch[name].tolist() == wanted[name].tolist(), name
    assert batch["token_type_ids"].sum() > 0
    assert batch["labels"].tolist() == [1, 0]
    long = work.training_inputs([("fox " * 50, "dog " * 50, 1)])
    assert len(long[0]["input_ids"]) == LENGTH


def test_a_nomic_bert_is_given_no_token_types(tmp_path):
    tokenizer = BackboneTokenizer(save_nomic(tmp_path / "nomic"), LENGTH)
    batch = work_of(FINETUNINGS["RTE"], tokenizer).collate(tokenizer.texts(["a"], ["b"]))
    assert sorted(batch) == ["attention_mask", "input_ids"]


def test_classes_and_scores(tokenizer):
    rows = [("a", "b", 0), ("a", "c", 1), ("a", "d", 1)]
    logits = np.array([[2.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    work = work_of(FINETUNINGS["RTE"], tokenizer)
    found = work.score(answered(logits=logits), "RTE", {"validation": rows})
    assert found["validation"]["accuracy"] == pytest.approx(2 / 3)
    work = work_of(FINETUNINGS["STS-B"], tokenizer)
    assert str(work.collate(work.training_inputs(rows))["labels"].dtype) == "torch.float32"
    found = work.score(answered(logits=logits[:, :1]), "STS-B", {"validation": rows})
    # 2, 0, 1 for 0, 1, 1
    assert found["validation"]["pearson"] == pytest.approx(-0.5 * 3**0.5)


def test_choices_share_their_premise(tokenizer):
    work = work_of(FINETUNINGS["COPA"], tokenizer)
    rows = [("the fox jumps", "cause", "the dog", "Paris", 1), ("where", "effect", "a", "b", 0)]
    inputs = work.training_inputs(rows)
    batch = work.collate(inputs)
    assert batch["input_ids"].shape[:2] == (2, 2)
    first = tokenizer.pretrained.decode(batch["input_ids"][0, 1])
    assert first.startswith("[CLS] the fox jumps")
    assert "paris" in first
    assert "[UNK]" in first, "What was the cause? has signs that the tiny vocabulary lacks"
    logits = np.array([[0.0, 1.0], [0.0, 1.0]])
    found = work.score(answered(logits=logits), "XCOPA", {"de": rows})
    assert found == {"de": {"accuracy": 0.5}}


def test_a_tag_stands_at_the_first_token_of_its_word(tokenizer):
    work = work_of(FINETUNINGS["WikiANN"], tokenizer)
    rows = [(["Paris", "foxes", "are"], [5, 6, 0]), (["dog"] * 60, [1] * 60)]
    inputs = work.training_inputs(rows)
    words = tokenizer.encode([rows[0][0]], is_split_into_words=True).word_ids(0)
    labels = inputs[0]["labels"].tolist()
    firsts = [words.index(word) for word in range(3)]
    assert [labels[place] for place in firsts] == [5, 6, 0]
    assert sum(label != IGNORED for label in labels) == 3
    assert len(words) > 5, "a word of several tokens"
    cut = inputs[1]["labels"]
    assert len(cut) == LENGTH
    assert (cut != IGNORED).sum() == LENGTH - 2
    batch = work.collate(inputs)
    assert batch["labels"].shape == batch["input_ids"].shape
    logits = np.zeros((2, LENGTH, 7))
    logits[:, :, 0] = 0.5
    logits[0, firsts[0], 5] = 1
    found = work.score(answered(logits=logits), "WikiANN", {"en": rows[:1]})["en"]
    # Paris alone is found, "Paris foxes" is wanted
    assert found == pytest.approx({"f1": 0.0, "accuracy": 2 / 3})
    logits[0, firsts[1], 6] = 1
    assert work.score(answered(logits=logits), "WikiANN", {"en": rows[:1]})["en"]["f1"] == 1


def test_answers_are_found_in_the_window_that_holds_them(tokenizer):
    work = work_of(FINETUNINGS["SQuAD"], tokenizer)
    place = LONG.index("fox")
    row = ("where", LONG, answers(("fox", place)))
    windows = work.training_inputs([row])
    assert len(windows) > 1
    held = [w for w in windows if w["end"]]
    assert 0 < len(held) < len(windows)
    for window in held:
        start, end = window["offsets"][window["start"], 0], window["offsets"][window["end"], 1]
        assert LONG[start:end] == "fox"
    for window in windows:
        if not window["end"]:
            assert not (window["offsets"][:, 0] == place).any()
    batch = work.collate(windows)
    assert batch["start_positions"].tolist() == [w["start"] for w in windows]


def test_the_best_span_of_all_windows_is_the_answer(tokenizer):
    work = work_of(FINETUNINGS["SQuAD"], tokenizer)
    place = LONG.index("fox")
    row = ("where", LONG, answers(("fox", place)))
    windows = work.training_inputs([row])
    start, end = (np.zeros((len(windows), LENGTH)) for _ in range(2))
    for number, window in enumerate(windows):
        # The first token and those of the question stand above all, and are no answer.
        start[number, 0] = end[number, 0] = start[number, 1] = 9.0
        if window["end"]:
            start[number, window["start"]] = end[number, window["end"]] = 5.0
    told = work.score(answered(start_logits=start, end_logits=end), "XQuAD", {"en": [row]})
    assert told == {"en": {"f1": 1.0, "exact_match": 1.0}}
    nothing = answered(start_logits=start * 0, end_logits=end * 0)
    assert work.score(nothing, "XQuAD", {"en": [row]})["en"]["exact_match"] == 0.0


def test_tatoeba_by_language_and_lareqa_among_all_languages(tokenizer):
    work = work_of(FINETUNINGS["SQuAD-retrieval"], tokenizer)
    rows = {"de": [("eins", "cats"), ("zwei", "dogs")], "fr": [("un", "fox")]}
    vectors = {"cats": [1, 0], "dogs": [0, 1], "fox": [0.9, 0.1], "eins": [1, 0.1], "zwei": [0, 1]}
    vectors["un"] = [1, 0]

    def predict(inputs, collate):
        texts = [
            tokenizer.pretrained.decode(i["input_ids"], skip_special_tokens=True) for i in inputs
        ]
        return [{"vectors": np.array(known[text], dtype=np.float32)} for text in texts]

    known = {
        tokenizer.pretrained.decode(
            tokenizer.pretrained(text)["input_ids"], skip_special_tokens=True
        ): vector
        for text, vector in vectors.items()
    }
    assert len(known) == len(vectors), "texts that the tiny tokenizer tells apart"
    apart = work.score(predict, "Tatoeba", rows)
    assert {name: m["accuracy"] for name, m in apart.items()} == {"de": 1.0, "fr": 1.0}
    together = work.score(predict, "LAReQA", rows)
    # "un" finds "cats" of the other language before its own "fox"
    assert together["fr"] == {"accuracy": 0.0, "map_at_20": 0.5}
    assert together["de"]["map_at_20"] == 1.0


def test_folders_without_a_tokenizer(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ArtifactError, match="tokenizer"):
        BackboneTokenizer(tmp_path, LENGTH)
