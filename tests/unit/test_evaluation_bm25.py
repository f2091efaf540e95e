"""BM25 as a baseline: its formula, and what it reads of documents and queries."""

import math
from unicodedata import category

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from mteb._create_dataloaders import _retrieval_texts
from mteb.mocks.mock_tasks import retrieval as mocks
from mteb.models.model_implementations import bm25 as of_mteb
from mteb.types import PromptType

from rayembed.data.words import search_words, words
from rayembed.evaluation.bm25 import Bm25
from rayembed.search.bm25_library import bm25s

TASK = mocks.MockRetrievalTask()


def found_by(model, data, task, subset="default"):
    where = {"task_metadata": task.metadata, "hf_split": "test", "hf_subset": subset}
    model.index(data["corpus"], **where, encode_kwargs={})
    return model.search(data["queries"], **where, top_k=10, encode_kwargs={})


def test_bm25_is_lucenes_formula():
    """idf · tf / (tf + k1 · (1 - b + b · length / mean length)) for a word in one of two texts."""
    corpus = Dataset.from_dict({"id": ["a", "b"], "text": ["red fox", "blue whale sings"]})
    queries = Dataset.from_dict({"id": ["q", "none"], "text": ["fox", "unknown"]})
    found = found_by(Bm25(), {"corpus": corpus, "queries": queries}, TASK)
    idf = math.log(1 + (2 - 1 + 0.5) / (1 + 0.5))
    expected = idf / (1 + 1.5 * (1 - 0.75 + 0.75 * 2 / 2.5))
    assert found["q"] == {"a": pytest.approx(expected, rel=1e-5)}
    assert found["none"] == {}


@pytest.mark.parametrize(
    "mock", ["MockRetrievalTask", "MockInstructionRetrieval", "MockMultilingualRetrievalTask"]
)
def test_titles_and_instructions_are_read_as_mteb_reads_them(monkeypatch, mock):
    # Without its stemmer, which is no part of ours.
    plain = dict.fromkeys(of_mteb._ISO3_TO_LANG, ("en", None, None))
    monkeypatch.setattr(of_mteb, "_ISO3_TO_LANG", plain)
    task = getattr(mocks, mock)()
    task.load_data()
    for subset, splits in task.dataset.items():
        wanted = found_by(of_mteb.BM25Search(), splits["test"], task, subset)
        found = found_by(Bm25(), splits["test"], task, subset)
        positive = {q: {d: s for d, s in of.items() if s > 0} for q, of in wanted.items()}
        assert any(positive.values())
        assert found == {
            query: {document: pytest.approx(score, rel=1e-6) for document, score in of.items()}
            for query, of in positive.items()
        }


def test_conversations_are_joined():
    task = mocks.MockRetrievalDialogTask()
    task.load_data()
    queries = task.dataset["default"]["test"]["queries"]
    texts = list(_retrieval_texts(queries, PromptType.query))
    corpus = Dataset.from_dict({"id": ["a", "b"], "text": [f"{text} twice" for text in texts]})
    joined = Dataset.from_dict({"id": queries["id"], "text": texts})
    found = found_by(Bm25(), {"corpus": corpus, "queries": queries}, task)
    assert all(found.values())
    assert found == found_by(Bm25(), {"corpus": corpus, "queries": joined}, TASK)


def test_what_stands_in_the_title_alone_is_found():
    names = [f"entity{i}" for i in range(20)]
    corpus = Dataset.from_dict(
        {"id": names, "title": names, "text": ["it is in the north"] * len(names)}
    )
    queries = Dataset.from_dict({"id": names, "text": [f"where is {name}" for name in names]})
    found = found_by(Bm25(), {"corpus": corpus, "queries": queries}, TASK)
    assert [next(iter(documents)) for documents in found.values()] == names


# Query, documents, and the one that answers.
UNSPACED = {
    "Chinese": (
        "登录密码忘了怎么办",
        [
            "如果您忘记了登录密码，请点击“找回”。",
            "发票将在三个工作日内寄出。",
            "产品支持两年保修。",
        ],
        0,
    ),
    "Japanese": (
        "佐々木さんの領収書",
        [
            "支払いはカードでできます。",
            "領収書は佐々木が発行しました。",
            "保証期間は二〇二五年までです。",
        ],
        1,
    ),
    "Thai": ("คืนเงิน", ["ติดต่อเราได้ทุกวัน", "สินค้าหมดแล้ว", "ขอคืนเงินได้ภายในเจ็ดวัน"], 2),
    "one character": ("猫", ["犬小屋の作り方", "黒猫が寝ている", "鳥かご"], 1),
    "half-width": ("ｶﾒﾗ", ["デジタルカメラの電池", "三脚", "レンズ"], 0),
    "Hindi": ("मेरी किताब", ["यह कलम है", "वह किताब अच्छी है", "दो घर"], 1),
}


@pytest.mark.parametrize("script", UNSPACED)
def test_words_of_scripts_without_spaces_are_characters_and_pairs_of_them(script):
    query, texts, wanted = UNSPACED[script]
    names = [str(place) for place in range(len(texts))]
    corpus = Dataset.from_dict({"id": names, "text": texts})
    queries = Dataset.from_dict({"id": ["q"], "text": [query]})
    found = found_by(Bm25(), {"corpus": corpus, "queries": queries}, TASK)["q"]
    best = max(found, key=found.__getitem__)
    assert best == str(wanted)
    of_bm25s = bm25s.tokenize([query, texts[wanted]], return_ids=False, show_progress=False)
    # Marks end a word there, so that parts of Thai words are found by chance.
    assert script == "Thai" or not set(of_bm25s[0]) & set(of_bm25s[1])


def test_other_texts_have_the_words_of_bm25s():
    texts = [
        "It's x² in Straße 5a, naïve_user — “quoted” 🎉 iPhone15!",
        "L’été à Paris; ΑΒΓ и ЖЗ",
        "한국어 문장",
        "",
    ]
    wanted = bm25s.tokenize(texts, stopwords=None, return_ids=False, show_progress=False)
    assert [search_words(text) for text in texts] == wanted
    mixed = search_words("Straße x2 的iPhone15手机")
    assert mixed == ["straße", "x2", "的", "iphone15", "手", "机", "手机"]


BESIDE = {
    "joiner": ("می\u200cخواهم", ["می", "خواهم"]),
    "joiner of a cluster": ("क्\u200dषमा", ["क्षमा"]),
    "index": ("CO₂", ["co₂"]),
    "exponent": ("m²", ["m²"]),
    "ligature": ("ﬁnance", ["ﬁnance"]),
    "full width": ("ＡＢＣ", ["abc"]),
    "square": ("㎏", ["kg"]),
    "radical": ("⾦", ["金"]),
    "presentation form": ("ﻣﺎ", ["ما"]),
    "point in its letter": ("שׁל", ["ש\u05c1ל"]),
    "dotted capital": ("İstanbul", ["istanbul"]),
    "its lower case": ("i\u0307stanbul", ["istanbul"]),
    "capital that is composed in lower case only": ("J\u030carl", ["ǰarl"]),
    "final sigma": ("ΟΣ.ΑΣ", ["οσ", "ασ"]),
    "other accent": ("άλφα", ["άλφα"]),
    "marks beyond the first plane": ("𑄃𑄧𑄁", ["𑄃𑄧𑄁"]),
}
OTHERS = ["❤\ufe0f", "東京", "ＡＢ", "ดี", "مثلاً", "𠀀", "plain été", "🎉"]


@pytest.mark.parametrize("kind", BESIDE)
def test_a_word_is_split_alike_beside_all_others(kind):
    word, wanted = BESIDE[kind]
    assert search_words(word) == wanted
    for other in OTHERS:
        assert search_words(f"{word}, {other}") == wanted + search_words(other)
        assert search_words(f"{other} {word}") == search_words(other) + wanted


@given(st.text(), st.text())
def test_words_of_two_texts_are_those_of_both(first, second):
    assert search_words(f"{first} \n {second}") == search_words(first) + search_words(second)


def test_punctuation_of_scripts_without_spaces_is_no_word():
    signs = [c for c in map(chr, range(0x20000)) if category(c) in {"Po", "Pd", "Ps", "Pe"}]
    signs += ["฿", "៛"]
    for left, right in (("ジ", "ジ"), ("ด", "ด"), ("က", "က"), ("ក", "ក")):
        assert [c for c in signs if search_words(left + c + right) != [left, right]] == []
        assert [c for c in signs if words(left + c + right) != [left, right]] == []
    assert search_words("ジョン・レ") == ["ジ", "ョ", "ン", "ジョ", "ョン", "レ"]


def test_of_documents_without_a_word_none_is_found():
    corpus = Dataset.from_dict({"id": ["a", "b"], "text": ["…", "the"]})
    queries = Dataset.from_dict({"id": ["q", "r"], "text": ["fox", "…"]})
    model = Bm25()
    assert found_by(model, {"corpus": corpus, "queries": queries}, TASK) == {"q": {}, "r": {}}
    assert (model.cost.documents, model.cost.bytes_per_document) == (2, 0)
    ranked = {"q": ["b", "a"], "r": ["a"]}
    found = model.search(queries, task_metadata=TASK.metadata, top_k=10, top_ranked=ranked)
    assert found == {"q": {"b": 0.0, "a": 0.0}, "r": {"a": 0.0}}
