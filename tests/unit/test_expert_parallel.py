"""Experts shared out among workers: which settings go together, what is left on a worker."""

from types import SimpleNamespace

import pytest
import torch

from rayembed.config.override import override
from rayembed.errors import ConfigError, PlacementError
from rayembed.models.experts import ExpertMlps, MoeMlp
from rayembed.recipes.catalogue import get_recipe
from rayembed.training.expert_parallel import SpreadExperts, spread_experts

REFUSED = {
    "expert_parallel 2 must divide placement.workers 1": [],
    "expert_parallel 4 must divide placement.workers 6": [
        "placement.workers=6",
        "placement.expert_parallel=4",
        "stages.pretrain.batch.global_pairs=6",
        "stages.finetune.batch.global_pairs=6",
    ],
    r"expert_parallel 3 cannot divide model\.experts\.num_experts 8 evenly": [
        "placement.workers=3",
        "placement.expert_parallel=3",
        "stages.pretrain.batch.global_pairs=6",
        "stages.finetune.batch.global_pairs=6",
    ],
    r"does not go together with placement\.zero_stage 3.* set zero_stage to 2": [
        "placement.workers=2",
        "placement.zero_stage=3",
    ],
    r"does not go together with placement\.zero_stage 0 in bfloat16.* set zero_stage to 1 or 2": [
        "placement.workers=2",
        "placement.zero_stage=0",
        "model.backbone.dtype=bfloat16",
    ],
    r"the model \(nomic-moe\) has no experts": ["placement.workers=2", "model.experts=null"],
}


def spread(changes):
    run = get_recipe("nomic-quickstart")
    changed = override(run, ["placement.workers=1", "placement.zero_stage=2"])
    return override(changed, ["placement.expert_parallel=2", *changes])


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_do_not_go_together_are_refused(message):
    with pytest.raises(ConfigError, match=message):
        spread(REFUSED[message])


def test_an_elastic_run_is_refused():
    with pytest.raises(ConfigError, match=r"does not go together with placement\.min_workers"):
        spread(["placement.workers=4", "placement.min_workers=2"])


def test_a_model_without_experts_is_refused():
    with pytest.raises(ConfigError, match=r"the model \(biencoder\) has no experts; set it to 1"):
        override(get_recipe("biencoder"), ["placement.workers=2", "placement.expert_parallel=2"])


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_settings_that_go_together_are_taken(zero):
    settings = ["placement.workers=4", f"placement.zero_stage={zero}"]
    run = spread([*settings, "model.backbone.dtype=float32"])
    assert (run.placement.expert_parallel, run.placement.zero_stage) == (2, zero)
    assert override(run, ["placement.expert_parallel=1"]).fingerprint == run.fingerprint


def layer():
    """Four experts with a bias, every row of which says whose it is."""
    mixture = MoeMlp(8, 6, 4, 2, hidden_bias=True)
    with torch.no_grad():
        for whole in mixture.experts.mlp.parameters():
            numbers = torch.arange(4.0).repeat_interleave(6)
            whole.copy_(numbers.view(-1, *[1] * (whole.ndim - 1)).expand_as(whole))
    return mixture


def test_a_worker_keeps_its_share_of_the_experts():
    mlp = layer().experts.mlp
    mlp.keep(2, 2)
    assert mlp.num_experts == 2
    for own in (mlp.w1, mlp.w2, mlp.b1):
        assert own.requires_grad
        assert own.shape[0] == 2 * 6
        assert own.unique().tolist() == [2.0, 3.0]
        assert own.untyped_storage().nbytes() == own.nbytes, "the rest is let go of"


def test_experts_without_any_row_still_have_gradients():
    """A worker must take part in the reduction of a step in which nobody needs its experts."""
    mlp = ExpertMlps(8, 6, 2, hidden_bias=True)
    mlp.products = "grouped"  # a kernel that takes no empty matrix is not asked
    rows = torch.zeros(0, 8, requires_grad=True)
    made = mlp(rows, torch.zeros(2, dtype=torch.int64))
    assert made.shape == (0, 8)
    made.sum().backward()
    for parameter in mlp.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_experts_that_are_shared_out_are_marked_and_others_are_not():
    mixture = layer()
    assert SpreadExperts.of(mixture) is None
    spread_experts(mixture, SimpleNamespace(size=2, place=1))
    marked = {n for n, p in mixture.named_parameters() if getattr(p, "allreduce", True) is False}
    assert marked == {f"experts.mlp.{name}" for name in ("w1", "w2", "b1")}
    assert {mixture.get_parameter(name).group_name for name in marked} == {"ep_size_2"}
    found = SpreadExperts.of(mixture)
    assert (found.num_experts, found.group.size) == (4, 2)


def test_experts_that_cannot_be_shared_out_are_refused():
    with pytest.raises(PlacementError, match="3 cannot split 4 experts equally"):
        spread_experts(layer(), SimpleNamespace(size=3, place=0))
    with pytest.raises(PlacementError, match="is 2, but the model has no experts to split"):
        spread_experts(torch.nn.Linear(2, 2), SimpleNamespace(size=2, place=0))
