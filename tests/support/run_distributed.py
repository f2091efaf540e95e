"""Run a function in several processes, with gloo or NCCL; used by the distributed tests."""

import gc
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nccl_rules import NcclRules, difference

IMPORTED_ONCE = (
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # each engine above ZeRO 0 does: torch's compiler
    "peft",
    "torch.distributed",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.nomic_bert.modeling_nomic_bert",
    "rayembed.models.loading.build",
    "rayembed.training.engine",
    "rayembed.training.job",
)
"""What processes on CPUs need: ten seconds of imports, which they have from one that forks them."""


def run_distributed(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    seconds: int = 300,
    accelerator: str = "cpu",
) -> list[Any]:
    """What `function(rank, world, *args)` returns in each of `world` processes, in order of rank.

    The processes find each other through a file, so that no port can be taken; a failure in one
    ends all and is raised here with its traceback. What NCCL would refuse, or hang at, is one.
    """
    # A test file is no importable module: the child loads it by its path.
    payload = pickle.dumps((inspect.getfile(function), function.__name__, args))
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _child,
            (world, payload, folder, accelerator),
            nprocs=world,
            join=False,
            start_method=_start_method(accelerator),
        )
        try:
            while not context.join(timeout=seconds):
                pass
        except Exception:  # noqa: BLE001  whatever it was is told by the children
            errors = [p.read_text() for p in sorted(Path(folder).glob("error*"))]
            raise AssertionError("\n".join(errors) or "a process ended without an error") from None
        told = [pickle.loads((Path(folder) / f"result{r}").read_bytes()) for r in range(world)]
    apart = difference({rank: calls for rank, (_, calls) in enumerate(told)})
    assert apart is None, f"NCCL would hang: {apart}"
    return [result for result, _ in told]


def _start_method(accelerator: str) -> str:
    """Forks of a process that has imported much and run nothing; a GPU bears no forks."""
    if accelerator == "cuda":
        return "spawn"
    os.environ["DS_ACCELERATOR"] = accelerator  # read when DeepSpeed is imported
    multiprocessing.set_forkserver_preload(list(IMPORTED_ONCE))
    return "forkserver"


def _child(rank: int, world: int, payload: bytes, folder: str, accelerator: str) -> None:
    gc.freeze()  # ZeRO 3 collects garbage, among the million objects of what was imported
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ |= {"DS_ACCELERATOR": accelerator, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    if accelerator == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if accelerator == "cuda" else "gloo"
    rules = NcclRules(accelerator)
    rules.install()
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    try:
        path, name, args = pickle.loads(payload)
        spec = importlib.util.spec_from_file_location("given_by_the_test", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        function = getattr(module, name)
        result = function(rank, world, *args)
        (Path(folder) / f"result{rank}").write_bytes(pickle.dumps((result, rules.calls)))
    except BaseException:
        (Path(folder) / f"error{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    finally:
        dist.destroy_process_group()
