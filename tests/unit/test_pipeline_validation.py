"""Scores of weights while a run trains are of the model that it would export."""

from types import SimpleNamespace

import pytest
import torch
from tiny_folders import tiny_parts, tiny_settings

from rayembed.models.adapters.lora import merged_state
from rayembed.models.loading.build import build_model
from rayembed.pipeline.run import validation

LORA = {"rank": 2, "alpha": 4, "dropout": 0.1}
OF_ENCODER = {
    "path": "given",
    "max_length": 48,
    "frozen": False,
    "lora": {**LORA, "target_modules": ["query", "dense"]},
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("nvembed", {"lora": LORA}), ("causal2vec", {"lora": LORA, "encoder": OF_ENCODER})],
)
def test_adapters_of_all_parts_are_merged_before_weights_are_scored(
    kind, changes, tmp_path, monkeypatch
):
    settings = tiny_settings(kind, **changes)
    model = build_model(settings, tiny_parts(kind, tmp_path), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    assert any(hasattr(module, "lora_A") for module in model.modules())
    exported = {name: merged_state(part) for name, part in model.parts.items()}
    seen = []
    monkeypatch.setattr(validation, "load_weights", lambda run, weights: model)
    monkeypatch.setattr(validation, "with_sets", lambda run, held_out: run)
    monkeypatch.setattr(validation, "validate", lambda found, run: seen.append(found) or {"t": 1.0})
    assert validation.score_weights((), SimpleNamespace(), "weights", "cpu") == {"t": 1.0}
    (found,) = seen
    assert not any(hasattr(module, "lora_A") for module in found.modules())
    for name, part in found.parts.items():
        state = part.state_dict()
        assert state.keys() == exported[name].keys()
        assert all(torch.equal(state[key], value) for key, value in exported[name].items())
