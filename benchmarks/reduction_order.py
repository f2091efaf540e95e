"""How many gradient reductions of a step begin before its last gradient is there.

Two workers (gloo) train a model whose last layers, the head, hold most of the weights, so that most
gradients are ready first. Counted for each ZeRO stage, for a step of one backward pass and of four,
as the platform sets DeepSpeed, with small buckets, and with small buckets and `overlap_comm`.
Run: python benchmarks/reduction_order.py
"""

import argparse
import os
import tempfile
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.utils._python_dispatch import TorchDispatchMode

SMALL = 4_000
"""Elements of a small bucket; the head is 51,200 and a layer below it 256."""

WAYS = {
    "as set": {},
    "small buckets": {"reduce_bucket_size": SMALL},
    "small buckets, overlap_comm": {"reduce_bucket_size": SMALL, "overlap_comm": True},
}


class Collectives(TorchDispatchMode):
    """Notes collectives, in their order, among other events."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "reduce" in func._schema.name:
            self.events.append("reduction")
        return func(*args, **(kwargs or {}))


def make_model():
    """Ten layers below a head of five matrices."""
    from rayembed.models.contract import TrainableModel

    class Deep(TrainableModel):
        def __init__(self):
            super().__init__()
            layer = partial(torch.nn.Linear, 16, bias=False)
            self.layers = torch.nn.ModuleList(layer(16) for _ in range(10))
            self.head = torch.nn.ModuleList(layer(640) for _ in range(5))

        def forward(self, states):
            for layer in self.layers:
                states = torch.tanh(layer(states))
            return sum(part(states).mean() for part in self.head)

        def backbone_parameter(self, name):
            return True

    return Deep()


def count(zero, passes, changes):
    """Reductions of a step's last backward pass: those before its last gradient, and all."""
    from rayembed.config.placement import Placement
    from rayembed.recipes.catalogue import get_recipe
    from rayembed.training import engine as module

    stage, settings = get_recipe("biencoder").stages[0], module.deepspeed_settings

    def changed(*given, **named):
        made = settings(*given, **named)
        made["zero_optimization"] |= changes
        return made

    model, events = make_model(), []
    module.deepspeed_settings = changed
    try:
        placement = Placement(zero_stage=zero)
        engine = module.DeepSpeedEngine(model, stage, placement, "float32", dist.get_world_size())
    finally:
        module.deepspeed_settings = settings
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    for _ in range(2):  # the first step of an engine makes its buffers
        for place in range(passes):
            events.clear()
            loss = engine.forward(torch.randn(4, 16))
            with Collectives(events):
                engine.backward(loss, place == passes - 1)
        engine.step(1.0)
    engine.close()
    last = max(place for place, event in enumerate(events) if event == "gradient")
    return events[:last].count("reduction"), events.count("reduction")


def work(rank, file):
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    lines = []
    for zero in range(4):
        for passes in (1, 4):
            found = [count(zero, passes, changes) for changes in WAYS.values()]
            told = " | ".join(f"{early} of {all_}" for early, all_ in found)
            lines.append(f"| {zero} | {passes} | {told} |")
    if rank == 0:
        print(f"| ZeRO | passes | {' | '.join(WAYS)} |\n|---|---|{'---|' * len(WAYS)}")
        print(*lines, sep="\n")
    dist.destroy_process_group()


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(work, (f"{folder}/rendezvous",), nprocs=2)


if __name__ == "__main__":
    main()
