"""What a run would need, against counts by hand and published sizes."""

import json

import pytest
import torch
from tiny_folders import KINDS, tiny_parts, tiny_settings
from tiny_models import save_decoder

from rayembed.config.override import override
from rayembed.config.placement import Placement
from rayembed.errors import ConfigError
from rayembed.models.contract import trainable_state
from rayembed.models.loading.build import build_model
from rayembed.models.nomic_moe.upcycling import CONVERTIBLE
from rayembed.pipeline.run.dry_run import machines, step_load
from rayembed.recipes.catalogue import get_recipe
from rayembed.training.checkpoints.checkpoint import expected_position, save_checkpoint
from rayembed.training.checkpoints.weights import write_weights
from rayembed.training.memory.graph_room import bytes_to_come
from rayembed_extras.estimates.published_shapes import PUBLISHED
from rayembed_extras.estimates.requirements import (
    ModelSize,
    checkpoint_bytes,
    export_bytes,
    known_settings,
    model_size,
    worker_memory,
)
from rayembed_extras.estimates.time import estimate

STAGES = ("retrieval", "blend")

MISTRAL_LORA = (
    16
    * 32
    * (
        2 * (4096 + 4096)  # q, o
        + 2 * (4096 + 1024)  # k, v: 8 of 32 heads
        + 3 * (4096 + 14336)  # gate, up, down
    )
)


def test_nv_embed_has_the_published_number_of_parameters():
    """The index of nvidia/NV-Embed-v2 gives 15,702,032,384 bytes in bf16."""
    run = get_recipe("nvembed-v2")
    size = model_size(run.model)
    assert (size.total - MISTRAL_LORA) * 2 == 15_702_032_384
    assert size.trainable == MISTRAL_LORA + 740_356_096  # all of the latent attention
    whole = model_size(override(run, ["model.lora=null"]).model)
    assert whole.total == whole.trainable == 15_702_032_384 // 2
    mean = model_size(override(run, ["model.pooling.kind=mean"]).model)
    assert mean.trainable == MISTRAL_LORA


def test_the_sample_models_have_their_published_sizes():
    changes = ["model.pooling.kind=mean", "model.backbone.num_layers=null"]
    smollm2 = override(get_recipe("nvembed-quickstart"), changes).model
    lora = 16 * 30 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    assert model_size(smollm2) == ModelSize(134_515_008 + lora, lora, lora)
    eight = model_size(override(get_recipe("nvembed-quickstart"), changes[:1]).model)
    assert eight.adapters == lora * 8 // 30
    assert eight.total - eight.adapters == 134_515_008 - 22 * 3_540_096
    minilm = model_size(get_recipe("biencoder").model)
    assert minilm.total == 22_713_216
    assert minilm.trainable == 22_713_216 - (384 * 384 + 384)  # its own pooler is frozen


def test_a_local_backbone_is_counted_from_its_configuration(tmp_path):
    run = get_recipe("biencoder")
    run = override(run, [f"model.backbone.path={tmp_path}"])
    with pytest.raises(ConfigError, match="no model there"):
        model_size(run.model)
    family = {"model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(family | layers))
    by_hand = 11 * 8 + (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 12 + 2 * 8) + 8
    assert model_size(run.model) == ModelSize(by_hand, by_hand)
    lora = override(run, ["model.lora={rank: 2, target_modules: [q_proj, down_proj]}"]).model
    assert model_size(lora).trainable == 2 * ((8 + 8) + (12 + 8))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="no model there"):
        model_size(run.model)
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(ConfigError, match="builds no model of the family 'nothing-known'"):
        model_size(run.model)


def test_what_only_the_hub_knows_is_not_known():
    run = override(get_recipe("biencoder"), ["model.backbone.path=hf://org/name@main"])
    assert known_settings(run.model.backbone.path, "model.backbone.path") is None
    assert model_size(run.model) is None


def test_adapters_on_layers_that_the_backbone_lacks_are_refused():
    run = override(get_recipe("biencoder"), ["model.lora={}"])
    has = (
        "'q_proj', but the model has no linear .*; its linear layers: dense, key, query, value\\. "
    )
    with pytest.raises(ConfigError, match=has):
        model_size(run.model)
    run = override(run, ["model.lora.target_modules=[query, q_proj]"])
    with pytest.raises(ConfigError, match="'q_proj'"):
        model_size(run.model)  # as the training refuses it
    run = override(run, ["model.lora.target_modules=[query, value]"])
    assert model_size(run.model).trainable == 16 * 6 * 2 * (384 + 384)


def test_heads_that_do_not_fit_are_refused():
    run = override(
        get_recipe("nvembed-quickstart"),
        ["model.pooling.kind=self_attention", "model.pooling.num_heads=7"],
    )
    with pytest.raises(ConfigError, match="7"):
        model_size(run.model)


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer"),
    [(0, 2000, 400, 1200), (1, 2000, 400, 300), (2, 2000, 100, 300), (3, 500, 100, 300)],
)
def test_memory_is_divided_as_zero_says(zero, weights, gradients, optimizer):
    size = ModelSize(total=1000, trainable=100)
    placement = Placement(workers=4, zero_stage=zero, reduce_once=False)
    memory = worker_memory(size, "bfloat16", placement)
    assert (memory.weights, memory.gradients, memory.optimizer) == (weights, gradients, optimizer)
    assert memory.total == weights + gradients + optimizer
    whole = placement.model_copy(update={"reduce_once": True})
    assert worker_memory(size, "bfloat16", whole).gradients == 400
    single = worker_memory(size, "float32", Placement(workers=1, zero_stage=zero))
    assert (single.weights, single.gradients, single.optimizer) == (4000, 400, 1200)


def test_an_elastic_run_needs_memory_as_with_its_fewest_workers_and_machines_for_all():
    size = ModelSize(total=1000, trainable=100)
    elastic = Placement(workers=8, min_workers=2, zero_stage=3, cpus_per_worker=0.5, use_gpu=True)
    fewest = worker_memory(size, "bfloat16", Placement(workers=2, zero_stage=3))
    assert worker_memory(size, "bfloat16", elastic) == fewest
    assert machines(elastic) == "2 to 8 workers with 1 to 4 CPUs, 2 to 8 GPUs"
    assert machines(Placement(workers=2)) == "2 workers with 2 CPUs, no GPU"


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer"),
    [(0, 1200, 2400, 7200), (1, 1200, 2400, 3000), (2, 1200, 2400, 3000)],
)
def test_a_worker_has_memory_for_its_experts_alone(zero, weights, gradients, optimizer):
    run = override(
        get_recipe("nomic-v2-moe"), ["placement.workers=4", "placement.expert_parallel=2"]
    )
    placement = run.placement.model_copy(update={"zero_stage": zero})
    size = ModelSize(total=1000, trainable=1000, experts=800)
    memory = worker_memory(size, "bfloat16", placement)
    assert (memory.weights, memory.gradients, memory.optimizer) == (weights, gradients, optimizer)


def test_the_experts_of_the_published_model():
    """Two matrices of 768 by 3,072 of 8 experts in 6 layers."""
    assert model_size(get_recipe("nomic-v2-moe").model).experts == 2 * 768 * 3072 * 8 * 6


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("once", [True, False])
def test_memory_is_what_training_expects_to_come(zero, once):
    """Beside master weights and a buffer of gradients, which are there before the first step."""
    placement = Placement(zero_stage=zero, reduce_once=once, workers=4)
    memory = worker_memory(ModelSize(1500, 1000), "bfloat16", placement)
    buffer = 1000 if zero == 3 and not once else 0
    masters = 1000 * 4 if zero == 0 else 1000
    expected = bytes_to_come(weights(1000, frozen=500), placement, 4, 12)
    assert expected == memory.gradients + memory.optimizer - masters - buffer


def test_memory_of_experts_is_what_training_expects_to_come():
    """Of 600 weights and 800 of experts, in groups of two workers, a worker holds 600 and 400."""
    for zero in (0, 1, 2):
        placement = Placement(zero_stage=zero, workers=4, expert_parallel=2)
        expected = bytes_to_come(weights(600, experts=400), placement, 4, 12)
        memory = worker_memory(ModelSize(1400, 1400, experts=800), "float32", placement)
        masters = 1400 if zero else 1000 * 4
        assert expected == memory.gradients + memory.optimizer - masters


def weights(trained, frozen=0, experts=0):
    """A module of so many weights, the experts of them marked as shared out."""
    module = torch.nn.Module()
    for name, size in {"trained": trained, "frozen": frozen, "experts": experts}.items():
        parameter = torch.nn.Parameter(torch.empty(size, device="meta"), name != "frozen")
        if name == "experts":
            parameter.allreduce = False
        module.register_parameter(name, parameter)
    return module


def test_the_backbone_of_the_nomic_quickstart_can_be_upcycled():
    path = get_recipe("nomic-quickstart").model.backbone.path
    assert PUBLISHED[path]["model_type"] in CONVERTIBLE


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_is_counted_as_it_is_built(kind, tmp_path):
    config, parts = tiny_settings(kind), tiny_parts(kind, tmp_path)
    model = build_model(config, parts, seed=1)
    told = model_size(config.model_copy(update=placed(config, parts)))
    assert told.total == sum(p.numel() for p in model.parameters())
    assert told.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)


def placed(config, parts):
    """Changes of the settings that name the folders of the parts."""
    return {
        name: getattr(config, name).model_copy(update={"path": str(at)})
        for name, at in parts.items()
    }


def test_mixtures_count_in_what_a_run_needs():
    plain = override(get_recipe("biencoder-quickstart"), [])
    own = plain.evaluation.own_sets[0].name
    guarded = override(plain, [f"evaluation.guard={{own_sets: [{own}], shares: [0.3, 0.6]}}"])
    assert guarded.evaluation.num_mixtures == 2
    size = model_size(plain.model)
    each = export_bytes(plain, size) / (len(plain.stages) + 1)
    assert export_bytes(guarded, size) == export_bytes(plain, size) + 2 * each
    assert estimate(guarded).seconds > estimate(plain).seconds


def test_disk_and_load_of_a_step():
    run = get_recipe("nvembed-quickstart")  # two stages, two checkpoints of each
    run = override(run, [f"stages.{name}.checkpoint_every_steps=1" for name in STAGES])
    run = override(run, ["model.backbone.dtype=bfloat16"])
    size = ModelSize(total=1000, trainable=100, adapters=60)
    assert checkpoint_bytes(run, size) == 100 * 2 * (2 * 12 + 2)
    few = override(run, [f"stages.{name}.checkpoint_every_steps=1000" for name in STAGES])
    assert checkpoint_bytes(few, size) == 100 * 2 * (1 * 12 + 2)
    assert export_bytes(run, size) == 940 * 2 * 3  # two stages and the untrained model
    assert export_bytes(override(run, ["evaluation.before_training=false"]), size) == 940 * 2 * 2
    assert export_bytes(override(run, ["evaluation.own_sets=[]"]), size) == 940 * 2 * 2
    v2 = get_recipe("nvembed-v2")
    load = step_load(v2, v2.stages[0])
    assert (load.texts, load.tokens) == (128 * 9, 128 * 9 * 512)


class Optimizer:
    """What DeepSpeed holds of each trained parameter."""

    def __init__(self, model):
        self._state = trainable_state(model)

    def written_states(self):
        for name, weight in self._state.items():
            moments = {key: torch.zeros(weight.shape) for key in ("exp_avg", "exp_avg_sq")}
            yield name, {**moments, "weight": weight.float(), "step": torch.zeros(())}

    def restore_optimizer_state(self, saved):
        raise AssertionError("nothing is restored here")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lora", ["{rank: 2}", "null"])
def test_disk_is_what_files_of_a_tiny_model_take(tmp_path, dtype, lora):
    """To 4 % and some kilobytes of names; a checkpoint more would be a quarter and more."""
    backbone = save_decoder(
        tmp_path / "backbone", hidden_size=128, intermediate_size=384, vocab_size=512
    )
    settings = [f"model.backbone.path={backbone}", f"model.backbone.dtype={dtype}"]
    settings += ["model.backbone.num_layers=null"]
    settings += [f"model.lora={lora}", "model.pooling.num_latents=16", "model.pooling.num_heads=4"]
    settings += [f"stages.{name}.checkpoint_every_steps=1" for name in STAGES]
    run = override(get_recipe("nvembed-quickstart"), settings)
    size = model_size(run.model)
    model = build_model(run.model, backbone, seed=0)
    (tmp_path / "checkpoint").mkdir()
    save_checkpoint(tmp_path / "checkpoint", Optimizer(model), expected_position("s", "f", "p"))
    write_weights(str(tmp_path / "weights"), trainable_state(model), {"run": "f"})
    model.save(tmp_path / "model")
    checkpoint = _size(tmp_path / "checkpoint", "state-*")
    stage = 2 * checkpoint + (tmp_path / "weights").stat().st_size
    assert checkpoint_bytes(run, size) == pytest.approx(2 * stage, rel=0.04, abs=50_000)
    exported = _size(tmp_path / "model", "**/*.safetensors")
    assert export_bytes(run, size) == pytest.approx(3 * exported, rel=0.04, abs=50_000)


def _size(folder, pattern):
    return sum(path.stat().st_size for path in folder.glob(pattern))
