"""Adapters of the published 7B runs in ZeRO 3."""

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.training.deepspeed_settings import deepspeed_settings, largest_adapter
from rayembed_extras.estimates.model_sizes import model_on_meta
from rayembed_papers.mixtures.nvembed import nvembed_v2_public

STEPS, PAIRS = 3, 16
STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": PAIRS, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1},
        "optimizer": {
            "learning_rate": 0.01,
            "pooling_learning_rate": 0.02,
            "weight_decay": 0.1,
            "warmup_steps": 1,
            "gradient_clipping": 0.5,
        },
        "steps": STEPS,
    },
)


def test_lora_of_a_7b_model_stays_whole_in_stage_3_and_its_frozen_matrices_do_not():
    model = model_on_meta(nvembed_v2_public().model)
    adapter = largest_adapter(model)
    settings = deepspeed_settings(STAGE, Placement(zero_stage=3), "bfloat16", 8, 10**9, adapter)
    whole = settings["zero_optimization"]["stage3_param_persistence_threshold"]
    lora = [p.numel() for name, p in model.named_parameters() if "lora_" in name]
    assert (len(lora), max(lora)) == (448, 16 * 14336)
    assert max(lora) <= whole
    assert whole < min(p.numel() for p in model.parameters() if p.ndim == 2 and not p.requires_grad)
    plain = deepspeed_settings(STAGE, Placement(zero_stage=3), "bfloat16", 8, 10**9)
    assert plain["zero_optimization"]["stage3_param_persistence_threshold"] < min(lora)
