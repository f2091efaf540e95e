"""What one worker adds to a checkpoint, and what it takes from it: shards, random state, position.

A checkpoint is a folder that all workers fill: DeepSpeed's shards in `state/`, `random-<rank>`
for each worker and `position.json`, by which it is recognised.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from rayembed.distributed.collectives import rank, world_size
from rayembed.distributed.random_state import capture, restore
from rayembed.errors import ArtifactError

POSITION = "position.json"


@dataclass(frozen=True)
class Position:
    """Where a stage stands, and of which run and plan."""

    stage: str
    step: int
    """Steps done; the next one has this number."""
    run_fingerprint: str
    plan_fingerprint: str
    workers: int
    zero_stage: int

    def at(self, step: int) -> "Position":
        """The same after `step` steps."""
        return replace(self, step=step)


class Shards(Protocol):
    """The part of an engine that a checkpoint needs."""

    def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Write this worker's shards."""
        ...

    def load(self, folder: Path) -> dict[str, Any]:
        """Take weights and optimiser from shards."""
        ...


def save_checkpoint(folder: Path, engine: Shards, position: Position) -> None:
    """Write this worker's part of a checkpoint; all workers must call it."""
    engine.save(folder, asdict(position))
    save_file(capture(), folder / f"random-{rank():05d}.safetensors")
    if rank() == 0:
        (folder / POSITION).write_text(json.dumps(asdict(position), indent=2), encoding="utf-8")


def read_position(folder: Path) -> Position:
    """The position of a checkpoint.

    Raises:
        ArtifactError: the folder holds no checkpoint, or one of another format.
    """
    path = folder / POSITION
    try:
        return Position(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ArtifactError(f"{str(folder)!r} is not a checkpoint: {error}") from None


def load_checkpoint(folder: Path, engine: Shards, expected: Position) -> int:
    """The number of steps done, after engine and random state were put back.

    Raises:
        ArtifactError: the checkpoint is of another run, plan, stage, number of workers or ZeRO
            stage than expected; the message says which and what to do.
    """
    found = read_position(folder)
    for name in ("stage", "run_fingerprint", "plan_fingerprint", "workers", "zero_stage"):
        saved, asked = getattr(found, name), getattr(expected, name)
        if saved != asked:
            raise ArtifactError(
                f"checkpoint {str(folder)!r} was made with {name} {saved!r}, this run has "
                f"{asked!r}; go on with the same, or start under another --name"
            )
    engine.load(folder)
    path = folder / f"random-{rank():05d}.safetensors"
    if not path.exists():
        raise ArtifactError(f"{str(folder)!r} lacks {path.name}: it is incomplete; remove it")
    restore(load_file(path))
    return found.step


def seed_worker(seed: int, stage_index: int) -> None:
    """Seed dropout, differently in each stage and on each worker."""
    torch.manual_seed((seed * 1_000_003 + stage_index) * 4096 + rank())


def expected_position(
    stage: str, run_fingerprint: str, plan_fingerprint: str, zero_stage: int
) -> Position:
    """The position that a checkpoint of this run must have, but for its step."""
    return Position(stage, 0, run_fingerprint, plan_fingerprint, world_size(), zero_stage)
