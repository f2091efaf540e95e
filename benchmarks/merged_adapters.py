"""What LoRA's adapters cost in passes without gradient, beside the same with the adapters merged.

Counted on torch's meta device: a pass of NV-Embed's 7B over 16,384 tokens in texts of 512, in use
(without dropout) and as GradCache's first pass (with it). Measured on this CPU: CPU seconds of
encoding documents by decoders with random weights, both in turn, the best of some rounds.
Run: python -m benchmarks.merged_adapters
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.gpu import made_up
from benchmarks.gpu.counting import Machine, PassCosts
from benchmarks.gpu.measuring import machine_line, print_table
from benchmarks.gpu.workloads import build, nvembed

from rayembed.config.settings import changed

SHAPES = {
    "2 layers of 64": (dict(made_up.TOY_DECODER), 2000),
    "12 layers of 768 (128M)": (
        {
            **made_up.TOY_DECODER,
            "vocab_size": 32_000,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
        },
        24,
    ),
}
"""Shape of a decoder and the number of documents."""


def counted() -> list[list[object]]:
    """Rows of the table of counts."""
    workload, machine = nvembed(), Machine()
    rows = []
    for name, training in (("in use", False), ("GradCache's first pass", True)):
        for kind in ("plain", "merged"):
            without = {"lora": None} if kind == "merged" else {}
            model = changed(workload.model, **without)

            def made(layers, model=model, training=training):
                return build(model, "plain", layers).train(training)

            costs = PassCosts(made, workload.layers, machine, gradient=False, padded=True)
            found = costs.of([512] * 32)
            of_token = found.product_flops / 16_384
            rows.append(
                [
                    f"{name}, {'merged' if kind == 'merged' else 'with adapters'}",
                    f"{of_token / 1e9:.3f}",
                    f"{found.kernels:,.0f}",
                    f"{1e3 * found.product_seconds:.0f}",
                    f"{1e3 * found.bytes / machine.memory:.0f}",
                    f"{1e3 * found.fused_bytes / machine.memory:.0f}",
                ]
            )
    return rows


def measured(rounds: int) -> list[list[object]]:
    """Rows of the table of measurements."""
    from rayembed.config.backbone import LoraConfig
    from rayembed.models.adapters.lora import merge_lora
    from rayembed.models.biencoder.config import BiEncoderConfig
    from rayembed.models.loading.build import build_model
    from rayembed.models.passes.encoding import encode

    rows = []
    for name, (shape, count) in SHAPES.items():
        with tempfile.TemporaryDirectory() as home:
            cpu = torch.device("cpu")
            folder = made_up.model_folder(Path(home) / "decoder", shape, cpu, "float32")
            backbone = {"path": str(folder), "dtype": "float32"}
            config = BiEncoderConfig(
                backbone=backbone, lora=LoraConfig(), query_max_length=512, document_max_length=512
            )
            both = [build_model(config, folder, seed=0).eval() for _ in range(2)]
        for model in both:
            draw = torch.Generator().manual_seed(0)
            for parameter_name, parameter in model.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.data.normal_(std=0.02, generator=draw)
        merge_lora(both[1])
        texts = made_up.documents(count, int(shape["vocab_size"]))
        vectors, best = [], [float("inf")] * 2
        for number in range(rounds + 1):
            for side, model in enumerate(both):
                began = time.process_time()
                found = encode(model, texts, role="document")
                if number:  # the first one warms
                    best[side] = min(best[side], time.process_time() - began)
                else:
                    vectors.append(found)
        off = float(abs(vectors[0] - vectors[1]).max())
        change = f"{1 - best[1] / best[0]:.1%}"
        rows.append([name, count, *(f"{one:.2f}" for one in best), change, f"{off:.0e}"])
    return rows


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(given)
    print(machine_line(torch.device("cpu")), f"\n{torch.get_num_threads()} threads, float32\n")
    heads = ["7B, 16,384 tokens", "GFLOP a token", "kernels", "products, ms"]
    print_table([*heads, "element-wise, ms", "fused, ms"], counted())
    print()
    heads = ["decoder, LoRA 16", "texts", "with adapters, CPU s", "merged, CPU s", "saved"]
    print_table([*heads, "largest difference"], measured(options.rounds))


if __name__ == "__main__":
    main()
