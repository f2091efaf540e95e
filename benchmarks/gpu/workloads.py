"""Models and steps of the roofline, on torch's meta device, and what a token's graph takes."""

from dataclasses import dataclass
from functools import partial

from benchmarks.gpu.lengths import BLEND, ONLY_RETRIEVAL, Kind


@dataclass(frozen=True)
class Workload:
    """A model to train, on the meta device, and its step."""

    model: object
    """Settings of the model."""
    layers: int
    budget: int
    """Tokens of a micro-batch."""
    kinds: tuple[Kind, ...] = BLEND
    rows: int = 128
    """Of a step on all GPUs."""
    texts: int = 9
    """Of a row."""


@dataclass(frozen=True)
class Graph:
    """Bytes of a token's graph, by what is kept of it."""

    whole: float
    layer: float
    """Of one layer, kept whole."""
    products: float
    """Of one layer of which products are kept."""
    input: float
    """Of one layer that is recomputed."""


def graph_of_token(workload: Workload, *, peft: bool = False) -> Graph:
    """Bytes of a token's graph, as the layers come."""
    from rayembed.training.memory.graph_room import graph_bytes
    from rayembed_extras.estimates.model_sizes import (
        _Answered,
        batch_on_meta,
        kept_bytes,
        kernels_on_meta,
    )

    before = "peft " if peft else ""
    texts, tokens = 16, 32

    def of_token(kind: str, layers: int) -> float:
        """Bytes of a further token: of what a pass keeps once nothing."""
        model = build(workload.model, before + kind, layers)

        def taken(number: int) -> int:
            batch = batch_on_meta(number, tokens)
            if kind == "kept":
                forward = partial(model, batch)
                return kept_bytes(forward, model.parameters(), padded=False)
            with kernels_on_meta(), _Answered(True):
                return graph_bytes(lambda: model(batch))

        return (taken(2 * texts) - taken(texts)) / (texts * tokens)

    one, two = of_token("kept", 1), of_token("kept", 2)
    layer = two - one
    of_products, of_input = (of_token(k, 2) - of_token(k, 1) for k in ("products", "recomputed"))
    return Graph(one + (workload.layers - 1) * layer, layer, of_products, of_input)


def build(settings, kind: str, layers: int):
    """The model on the meta device with this number of layers."""
    from peft.tuners.lora.layer import Linear

    from rayembed.config.settings import changed
    from rayembed.models.adapters.adapted_linear import AdaptedLinear
    from rayembed.models.layers import recompute_layers
    from rayembed_extras.estimates.model_sizes import model_on_meta

    backbone = changed(settings.backbone, num_layers=layers)
    model = model_on_meta(changed(settings, backbone=backbone))
    if "recomputed" in kind:
        model.recompute()
    if "products" in kind:
        recompute_layers(model.parts.values(), 0, layers)
    for module in model.modules():
        if "peft" in kind and isinstance(module, AdaptedLinear):
            module.__class__ = Linear
    return model


def nvembed() -> Workload:
    """The recipe's model and micro-batches."""
    from rayembed_papers.mixtures.nvembed import nvembed_v2_public

    run = nvembed_v2_public()
    return Workload(run.model, 32, run.placement.micro_batch_tokens)


def of_training(name: str, gpus: int) -> Workload:
    """A case of the benchmark of training on one GPU, on each of several."""
    from benchmarks.gpu import made_up
    from benchmarks.gpu.training import cases, settings_of

    from rayembed.config.settings import changed

    case = cases(toy=False)[name]
    published = made_up.MISTRAL_7B if case.lora else made_up.BERT_BASE
    model = changed(settings_of(case, published, "bfloat16"))
    if not case.lora:
        none = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        model = changed(model, backbone=changed(model.backbone, **none))
    layers = case.shape["num_hidden_layers"]
    budget, rows = case.micro_batch_tokens, case.pairs * gpus
    return Workload(model, layers, budget, ONLY_RETRIEVAL, rows, texts=2)


def toy() -> Workload:
    """The quickstart's model, with two layers and as if they were four."""
    from rayembed.config.settings import changed
    from rayembed.recipes.nvembed import quickstart

    model = quickstart().model
    backbone = changed(model.backbone, num_layers=4, dtype="bfloat16")
    return Workload(changed(model, backbone=backbone), 4, 4096)
