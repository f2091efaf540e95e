import threading

import numpy as np
import pytest
import torch
from toy_model import ToyModel

from rayembed.errors import ConfigError, DataError
from rayembed.models.contract import cost
from rayembed.models.passes import encoding, passes
from rayembed.models.passes.encoding import corpus_budget, encode, encode_tokens
from rayembed.models.passes.micro_batches import cut_by_length

TEXTS = ["abc", "a longer text than that", "abc", "z", "a longer text than that", "mid size"]


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_order_duplicates_and_mode(budget):
    model = ToyModel(dropout=0.5).train()
    seen, calls = [], []
    forward = model.forward
    model.forward = lambda batch: seen.append(len(batch["input_ids"])) or forward(batch)
    found = encode(
        model,
        TEXTS,
        role="query",
        tokens_per_batch=budget,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert model.training
    assert sum(seen) == 4  # distinct texts
    assert calls[-1] == (4, 4)
    assert found.dtype == np.float32
    model.eval()
    for row, text in enumerate(TEXTS):
        batch = model.tokenizer.collate(model.tokenizer([text], "query"))
        with torch.no_grad():
            alone = forward(batch).embeddings[0].numpy()
        np.testing.assert_allclose(found[row], alone, atol=1e-6)


def test_passes_of_small_models_on_a_gpu_are_larger(monkeypatch):
    """Those of a large one hide their launches."""
    model = ToyModel()
    assert corpus_budget(model) == 2048
    monkeypatch.setattr(ToyModel, "device", torch.device("cuda"))
    assert corpus_budget(model) == 65_536
    model.large = torch.nn.Parameter(torch.empty(7 * 10**9, device="meta"))
    assert corpus_budget(model) == 16_384


def test_no_texts_give_no_vectors():
    assert encode(ToyModel(), [], role="document").shape == (0, 8)


def test_a_single_text_gives_one_vector():
    model = ToyModel().eval()
    one = encode(model, TEXTS[1], role="query")
    assert one.shape == (8,)
    np.testing.assert_allclose(one, encode(model, TEXTS, role="query")[1], atol=1e-6)


@pytest.mark.parametrize(
    ("texts", "role", "error", "message"),
    [
        (["a"], "quary", ConfigError, r"role = 'quary': did you mean 'query'\?"),
        (["a"], None, ConfigError, "role = None: allowed: document, query"),
        (["a", None], "query", DataError, r"texts\[1\] is not a text but None \(NoneType\)"),
        ([b"a"], "query", DataError, r"texts\[0\] is not a text but b'a' \(bytes\)"),
        (["a", " "], "query", DataError, r"1 of 2 texts .*: texts\[1\]\. .* allow_empty=True"),
        (["a", *["\u200b"] * 7], "query", DataError, r"7 of 8 .*, texts\[5\] and 2 more\. Leave"),
        ("", "query", DataError, r"texts\[0\]"),
    ],
)
def test_what_cannot_be_embedded_is_refused_in_words(texts, role, error, message):
    with pytest.raises(error, match=message):
        encode(ToyModel(), texts, role=role)


def test_mode_is_put_back_after_an_error():
    model = ToyModel().train()

    def fail(batch):
        raise DataError("broken")

    model.forward = fail
    with pytest.raises(DataError):
        encode(model, ["a"], role="query")
    assert model.training


MANY = [f"text {'word ' * (number * 7 % 23)}{number}" for number in range(60)]


def one_after_the_other(model, texts, budget):
    """Vectors by a loop without threads."""
    tokens = model.tokenizer(texts, "query")
    vectors = np.empty((len(texts), 8), np.float32)
    for chosen in cut_by_length([cost(one) for one in tokens], budget, 48):
        with torch.inference_mode():
            made = model(model.tokenizer.collate([tokens[place] for place in chosen]))
        vectors[chosen] = made.embeddings.numpy()
    return vectors


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Micro-batches are collated ahead on a CPU too."""
    monkeypatch.setattr(passes, "_CPU_READY", passes._GPU_READY)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_work_beside_the_device_gives_the_bits_of_a_loop_without_threads(monkeypatch):
    model = ToyModel().eval()
    expected = one_after_the_other(model, MANY, 100)
    np.testing.assert_array_equal(encode(model, MANY, role="query", tokens_per_batch=100), expected)
    monkeypatch.setattr(encoding, "_CPU_TEXTS", 25)
    calls = []
    parts = encode(
        model,
        MANY,
        role="query",
        tokens_per_batch=100,
        progress=lambda done, count: calls.append((done, count)),
    )
    by_part = [one_after_the_other(model, MANY[i : i + 25], 100) for i in (0, 25, 50)]
    np.testing.assert_array_equal(parts, np.concatenate(by_part))
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (60, 60)


def test_the_next_texts_are_tokenised_while_the_device_computes(monkeypatch):
    monkeypatch.setattr(encoding, "_CPU_TEXTS", 10)
    model = ToyModel().eval()
    tokenized, embedded, ahead, second = [], [], [], threading.Event()
    forward, tokenize = model.forward, model.tokenizer

    class Watched(type(tokenize)):
        def __call__(self, texts, *rest, **options):
            tokenized.append(threading.current_thread())
            if len(tokenized) == 2:
                second.set()
            return super().__call__(texts, *rest, **options)

    def slow(batch):
        # The first pass waits until the tokens of the next texts are made.
        assert embedded or second.wait(10)
        ahead.append(len(tokenized) - sum(embedded) // 10)
        embedded.append(len(batch["input_ids"]))
        return forward(batch)

    model.tokenizer, model.forward = Watched(), slow
    encode(model, MANY, role="query", tokens_per_batch=10_000)
    assert len(tokenized) == 6
    assert threading.main_thread() not in tokenized
    # One part in use, one ready, one that waits for its place: memory does not grow with texts.
    assert max(ahead) <= 3


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("when", ["tokenize", "collate", "forward"])
def test_an_error_beside_the_device_reaches_the_caller_and_ends_the_threads(monkeypatch, when):
    monkeypatch.setattr(encoding, "_CPU_TEXTS", 10)
    model = ToyModel().train()
    forward, calls = model.forward, []

    class Broken(type(model.tokenizer)):
        def __call__(self, *given, **options):
            return self._counted("tokenize", super().__call__, *given, **options)

        def collate(self, tokens):
            return self._counted("collate", super().collate, tokens)

        def _counted(self, what, work, *given, **options):
            calls.append(what)
            if what == when and calls.count(what) == 3:
                raise DataError("broken text")
            return work(*given, **options)

    def fail(batch):
        if when == "forward":
            raise DataError("broken text")
        return forward(batch)

    model.tokenizer, model.forward = Broken(), fail
    with pytest.raises(DataError, match="broken text"):
        encode(model, MANY, role="query", tokens_per_batch=100)
    assert model.training
    assert not [one for one in threading.enumerate() if one.name == "done-ahead"]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_single_pass_starts_no_thread(monkeypatch):
    monkeypatch.setattr(passes, "done_ahead", None)
    model = ToyModel().eval()
    assert encode(model, "a request", role="query").shape == (8,)
    with pytest.raises(TypeError, match="not callable"):
        encode_tokens(model, model.tokenizer(MANY, "query"), tokens_per_batch=50)
