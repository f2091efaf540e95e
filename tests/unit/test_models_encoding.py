import numpy as np
import pytest
import torch
from toy_model import ToyModel

from rayembed.errors import DataError
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


def test_mode_is_put_back_after_an_error():
    model = ToyModel().train()

    def fail(batch):
        raise DataError("broken")

    model.forward = fail
    with pytest.raises(DataError):
        encode(model, ["a"], role="query")
    assert model.training
