"""Every member of the table of architectures does what trainer, evaluator and registry ask."""

import architecture_contract as contract
import pytest
from tiny_folders import KINDS, TINY, tiny_parts, tiny_settings

from rayembed.config.model import ARCHITECTURES

ADAPTED = [kind for kind in KINDS if "lora" in ARCHITECTURES.classes()[kind].model_fields]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Pretrained parts by kind."""
    home = tmp_path_factory.mktemp("parts")
    return {kind: tiny_parts(kind, home / kind) for kind in KINDS}


def test_no_architecture_is_left_out():
    assert set(KINDS) == set(TINY)
    assert set(KINDS) - set(ADAPTED) == {"nomic-moe"}


@pytest.mark.parametrize("kind", KINDS)
def test_it_embeds(kind, parts):
    contract.embeds(tiny_settings(kind), parts[kind])


@pytest.mark.parametrize("kind", ADAPTED)
def test_it_takes_adapters(kind, parts, tmp_path):
    contract.adapts(tiny_settings(kind, lora=None), parts[kind], tmp_path / "saved")


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_in_rayembed_sentence_transformers_and_mlflow(kind, parts, tmp_path):
    contract.comes_back(tiny_settings(kind, **whole(kind)), parts[kind], tmp_path / "saved")


@pytest.mark.parametrize("kind", KINDS)
def test_a_further_stage_goes_on(kind, parts, tmp_path):
    contract.goes_on(tiny_settings(kind, **whole(kind)), parts[kind], tmp_path / "saved")


@pytest.mark.parametrize("kind", KINDS)
def test_grad_cache_equals_one_graph(kind, parts):
    contract.caches(tiny_settings(kind, **whole(kind)), parts[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_the_same_everywhere(kind, parts, tmp_path):
    contract.prompts(tiny_settings(kind), parts[kind], tmp_path / "saved")


@pytest.mark.parametrize("kind", KINDS)
def test_it_stands_in_the_card(kind):
    contract.stands_in_the_card(tiny_settings(kind))


def whole(kind):
    """Changes that train the whole model."""
    return {"lora": None} if kind in ADAPTED else {}
