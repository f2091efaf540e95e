"""Memory of a training worker before it starts: counted for shapes, against what torch keeps."""

import io
import re

import pytest
import torch
from tiny_models import save_decoder, save_encoder
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from rayembed.config.override import override
from rayembed.config.placement import GPUS, Placement
from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.loading.build import build_model
from rayembed.pipeline.checks.files import AtHand
from rayembed.pipeline.run.dry_run import print_dry_run
from rayembed.pipeline.run.training_job import training_job
from rayembed.recipes.catalogue import get_recipe
from rayembed_extras.estimates import model_sizes
from rayembed_extras.estimates.model_sizes import activations, kept_bytes, kernels_on_meta
from rayembed_extras.estimates.needs import gpu_memory, gpus_that_fit, host_bytes
from rayembed_extras.estimates.requirements import model_size

RECIPE = get_recipe("nvembed-v2-public")


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(model_sizes, "cache_folder", lambda: tmp_path / "none")


def settings(folder, **more):
    backbone = {"path": str(folder), "dtype": "float32"}
    return parse(BiEncoderConfig, {"backbone": backbone, **more})


def kept_by_torch(model):
    """Bytes that torch keeps for a token's backward pass, on the CPU with weights and values."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def kept(texts):
        found = {}

        def pack(tensor):
            if tensor.shape == (texts, 1, 32, 32) and tensor.dtype == torch.float32:
                return tensor  # a mask in the type of the scores, which only CPUs make
            found[tensor.untyped_storage().data_ptr()] = tensor  # held: no address comes twice
            return tensor

        ids = torch.randint(3, 100, (texts, 32), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[0, -1] = 0
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            model({"input_ids": ids, "attention_mask": mask, "pool_mask": mask})
        return sum(t.untyped_storage().nbytes() for at, t in found.items() if at not in own)

    return (kept(16) - kept(8)) / (8 * 32)


@pytest.mark.parametrize("save", [save_encoder, save_decoder], ids=["encoder", "decoder"])
@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4, "dropout": 0.0}])
def test_a_token_takes_what_torch_keeps_of_it(tmp_path, save, lora):
    folder = save(tmp_path / "model")
    if lora is not None:
        names = ["query", "dense"] if save is save_encoder else ["q_proj", "down_proj"]
        lora = {**lora, "target_modules": names}
    config = settings(folder, lora=lora)
    found = activations(config)
    model = build_model(config, folder, seed=0)
    model.backbone.set_attn_implementation("sdpa")  # ours for CPUs keeps all scores
    # Norms of the pooled vectors are what is not counted.
    assert found.kept == pytest.approx(kept_by_torch(model), rel=0.02)
    model.recompute_layers()
    assert found.kept_recomputing == pytest.approx(kept_by_torch(model), rel=0.02)
    assert found.kept_recomputing < found.of_layer < found.kept


def test_what_is_recomputed_leaves_a_layers_input_and_dropout_of_adapters_bits(tmp_path):
    deep = save_decoder(tmp_path / "deep", num_hidden_layers=5)
    shallow = save_decoder(tmp_path / "shallow", num_hidden_layers=4)
    found, less = (activations(settings(folder)) for folder in (deep, shallow))
    assert found.kept_recomputing - less.kept_recomputing == 4 * 32
    assert found.kept - less.kept == pytest.approx(found.of_layer)

    lora = {"rank": 2, "alpha": 4, "target_modules": ["q_proj"]}
    dropped, whole = (
        activations(settings(deep, lora={**lora, "dropout": share})) for share in (0.1, 0.0)
    )
    assert dropped.of_layer - whole.of_layer == 32 // 8, "a bit a number, and the input is kept"


def test_the_7b_model_takes_what_was_counted_before():
    """An independent count gave 0.6 and 8.6 MB a token, and 9.9 GB for 16,384 tokens; of these 8.6
    adapters' masks and dropped copies, which are no longer kept, were 2.3 in 32 layers: 3 bytes for
    each of 38,912 inputs, less 2 for each of 22,528 that are kept in their place, and a bit each.
    """
    found = activations(RECIPE.model)
    assert found.kept_recomputing == pytest.approx(0.6e6, rel=0.08)
    assert found.kept == pytest.approx(8.6e6 - 32 * ((3 - 1 / 8) * 38_912 - 2 * 22_528), rel=0.05)
    assert 16_384 * found.kept_recomputing == pytest.approx(9.9e9, rel=0.08)


def test_a_gpu_holds_states_buffers_and_the_graphs_of_the_placement():
    size = model_size(RECIPE.model)

    def of(*changes):
        return gpu_memory(override(RECIPE, list(changes)), size)

    found = activations(RECIPE.model)
    cached = of()
    assert cached.buffers == size.trainable * 2 + 500_000_000 * 6
    layer = 16_384 * found.of_layer
    assert cached.activations == pytest.approx(16_384 * found.kept_recomputing + layer)
    assert cached.total == cached.states.total + cached.buffers + cached.activations + 2 * 10**9
    # 32 GB and 3 GB beside them were reckoned before, without the layer that is computed again.
    assert cached.total - layer == pytest.approx(35e9, rel=0.08)
    whole = of("placement.grad_cache=false")
    assert whole.activations == pytest.approx(128 * 9 * 512 // 8 * found.kept_recomputing + layer)
    kept = of("placement.gradient_checkpointing=false")
    assert kept.activations == pytest.approx(16_384 * found.kept)
    assert of("placement.zero_stage=3", "placement.workers=32").total < cached.total / 1.5
    alone = of("placement.workers=1", "placement.zero_stage=0", "placement.micro_batch_tokens=64")
    assert alone.buffers == 0
    assert host_bytes(RECIPE, size) == 2 * size.total
    taught = of(f"stages.{RECIPE.stages[0].name}.hidden_states={{teacher: whole}}")
    assert taught.states.teacher == 2 * (size.total - size.adapters)
    assert taught.states.total == cached.states.total + taught.states.teacher
    states = 16_384 * found.kept_recomputing
    assert taught.activations == pytest.approx(cached.activations + states)


def test_the_gpus_that_hold_it_are_named():
    size = model_size(RECIPE.model)

    def fit(*changes):
        yes, no = gpus_that_fit(gpu_memory(override(RECIPE, list(changes)), size))
        assert sorted([*yes, *no]) == sorted(GPUS)
        return yes

    assert fit()[:4] == ["B200", "H200", "H100", "A100 80 GB"]
    assert "A10G" not in fit()
    assert "A100 40 GB" not in fit("placement.micro_batch_tokens=32768")
    assert fit("placement.gradient_checkpointing=false") == ["B200", "H200"]
    assert "A10G" in fit("placement.zero_stage=3", "placement.micro_batch_tokens=4096")


def printed(*changes, recipe="nvembed-v2-public"):
    tables = io.StringIO()
    run = override(get_recipe(recipe), list(changes))
    print_dry_run(run, AtHand(run), out=io.StringIO(), tables=tables)
    return " ".join(tables.getvalue().replace("│", " ").split())


def test_a_dry_run_tells_gpus_and_host_memory_and_what_is_not_counted():
    told = printed()
    assert re.search(r"activations of texts of full length 1\d\.\d\d GiB", told)
    assert "B200, H200, H100, A100 80 GB" in told
    assert re.search(r"; not [A-Z0-9, ]*A10G, L4, T4", told)
    assert "14.70 GiB while it loads" in told
    experts = printed(recipe="nomic-v2-moe")
    assert "GiB and activations: weights" in experts
    assert "activations would decide" in experts
    on_cpus = printed(recipe="nvembed-quickstart")
    assert "GiB and activations: weights" in on_cpus
    assert "GPU" not in on_cpus.replace("no GPU", "")


def test_a_named_gpu_is_held_against_the_run():
    assert re.search(r"on H100: 3\d\.\d\d GiB of 75\.05 GiB", printed("placement.gpu=H100"))
    with pytest.raises(
        ConfigError, match=r"gpu is A10G, .* 20\.90 GiB of memory, but this run needs 3\d\."
    ):
        printed("placement.gpu=A10G")
    smaller = ["placement.zero_stage=3", "placement.micro_batch_tokens=4096"]
    assert "on A10G: " in printed("placement.gpu=a10g", *smaller)
    experts = printed("placement.gpu=B200", recipe="nomic-v2-moe")
    assert "on B200 without activations, which are not counted" in experts


def test_a_run_that_does_not_fit_the_named_gpu_is_told_whole_and_ends_with_2(capfd):
    asked = ["--recipe", "nvembed-v2-public", "--dry-run", "--set", "placement.gpu=a100-40gb"]
    job = training_job("nvembed-quickstart")
    assert job(asked) == 0
    assert job([*asked, "--set", "placement.micro_batch_tokens=32768"]) == 2
    printed = capfd.readouterr()
    assert printed.out.count("# run nvembed") == 2
    assert "not on A100 40 GB" in printed.err
    assert "error: placement.gpu is A100 40 GB" in printed.err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"use_gpu": True, "gpu": "H10O"},
            "the GPU 'H10O' is unknown; known GPUs are B200",
        ),
        (
            {"gpu": "H100", "use_gpu": False},
            r"placement.gpu is H100, but placement.use_gpu=false trains on CPUs",
        ),
    ],
)
def test_a_gpu_that_is_not_known_or_not_used_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        parse(Placement, values)


def test_activations_are_counted_once_on_a_machine(tmp_path, monkeypatch):
    folder = save_encoder(tmp_path / "model")
    monkeypatch.setattr(model_sizes, "cache_folder", lambda: tmp_path)
    first = model_sizes.remembered_activations(settings(folder))
    monkeypatch.setattr(model_sizes, "activations", lambda _: 1 / 0)
    assert model_sizes.remembered_activations(settings(folder)) == first
    with pytest.raises(ZeroDivisionError):
        model_sizes.remembered_activations(settings(folder, query_max_length=7))


def test_torchs_own_attention_and_dropout_come_back():
    before = functional.scaled_dot_product_attention, functional.dropout
    with pytest.raises(TypeError), kernels_on_meta():
        functional.dropout(None, 0.5, True)
    assert (functional.scaled_dot_product_attention, functional.dropout) == before


def test_memory_is_counted_on_the_meta_device():
    layer, given = nn.Linear(4, 4, device="meta"), torch.zeros(3, 4, device="meta")
    host = torch.ones(3, requires_grad=True)

    def forward():
        host * host.detach()  # the host's, which counts for nothing
        return torch.tanh(layer(given))

    # Inputs of the layer and outputs of the tangent; weights do not count.
    assert kept_bytes(forward, layer.parameters()) == 2 * 3 * 4 * 4
