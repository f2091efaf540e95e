import numpy as np
import pytest
import torch
from toy_model import ToyModel

from rayembed.errors import ConfigError, DataError
from rayembed.models.encoding import encode

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
        (["a", None], "query", DataError, r"text 2 of 2 is no text but None \(NoneType\)"),
        ([b"a"], "query", DataError, r"text 1 of 1 is no text but b'a' \(bytes\)"),
        (["a", " "], "query", DataError, r"text 2 of 2 \(' '\) has no tokens .* allow_empty=True"),
        ("", "query", DataError, "text 1 of 1"),
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
