"""Checkpoints of a stage: full optimiser states, random state, and the number of finished
steps.

Headers hold a digest of each tensor, which is compared when it is read.

A checkpoint is a folder that all workers fill: `state-<rank>.safetensors` with its share of the
parameters (each one whole: fp32 weight, the optimiser's states and step; the loss's among them),
`random-<rank>.safetensors` and `position.json`, by which it is recognised. Nothing in it depends on
how many workers there were or on the ZeRO stage, so a run goes on with other ones.
"""

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rayembed.assets.atomic import room_for
from rayembed.assets.finite import check_finite
from rayembed.assets.storage import (
    download_folder,
    is_remote,
    join,
    read_bytes,
)
from rayembed.distributed.collectives import rank, world_size
from rayembed.distributed.random_state import capture, restore
from rayembed.errors import ArtifactError, StorageError
from rayembed.training.checkpoints.weights import read_header, tensors_digest
from rayembed.training.contrastive.engine_module import PREFIX

logger = logging.getLogger(__name__)

POSITION = "position.json"
_SEPARATOR = "|"
_DIGESTS = "digests"
"""Entry of a header: tensor name → digest, in JSON."""


@dataclass(frozen=True)
class Position:
    """Position of a checkpoint: its stage and step, with the run, plan and number of workers that
    it belongs to.
    """

    stage: str
    step: int
    """Completed steps; the next step has this number."""
    run_fingerprint: str
    plan_fingerprint: str
    workers: int
    dropped_steps: int = 0
    """Number of completed steps that changed no weights."""

    def at(self, step: int, dropped_steps: int = 0) -> "Position":
        """Return a copy of this position for another step."""
        return replace(self, step=step, dropped_steps=dropped_steps)


class StatefulEngine(Protocol):
    """Protocol of the engine methods that checkpoints need."""

    def written_states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield name and full state of each parameter that this worker writes; all workers must
        call it together. Each state is written by one worker.
        """
        ...

    def restore_optimizer_state(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load this worker's share of the saved full states."""
        ...


def save_checkpoint(folder: Path, engine: StatefulEngine, position: Position) -> None:
    """Write this worker's part of a checkpoint; all workers must call it together.

    Raises:
        ArtifactError: a weight or moment is not finite.
        StorageFullError: the disk is full.
    """
    mine: dict[str, Tensor] = {}
    for name, state in engine.written_states():
        states = ((f"{name} ({key})", value) for key, value in state.items())
        check_finite(states, f"the checkpoint of step {position.step}")
        # Copies: they may be views of one buffer, which safetensors refuses.
        for key, value in state.items():
            mine[f"{name}{_SEPARATOR}{key}"] = value.to("cpu", copy=True)
    stamp = _stamp(position)
    with room_for(folder, "or set TMPDIR to a folder on another disk"):
        for name, tensors in ((_state_file(rank()), mine), (_random_file(rank()), capture())):
            told = {key: tensors_digest({key: value}) for key, value in tensors.items()}
            save_file(tensors, folder / name, metadata={**stamp, _DIGESTS: json.dumps(told)})
        if rank() == 0:
            text = json.dumps(asdict(position), indent=2)
            (folder / POSITION).write_text(text, encoding="utf-8")


@contextmanager
def checkpoint_on_disk(folder: str) -> Iterator[Path]:
    """Download a checkpoint from storage to a temporary folder, or yield its own folder if it is
    local.

    Raises:
        ArtifactError: there is none.
        StorageError: the storage does not give it.
        StorageFullError: this machine's disk has no room for it.
    """
    if not is_remote(folder):
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as place:
        download_folder(folder, Path(place))
        yield Path(place)


_CAUSES = {"plan_fingerprint": " settings and data"}
"""Field of a position → what it is that must be the same."""


def find_damage(folder: str) -> str | None:
    """Describe the missing or broken part of a checkpoint in storage; None if it is
    complete.

    It has all files of all its workers, each as long as it must be and of the same step.

    Raises:
        StorageError: the storage does not answer, which tells nothing of the checkpoint.
    """
    try:
        position = read_position(folder)
        stamp = _stamp(position)
        for worker in range(position.workers):
            for name in (_state_file(worker), _random_file(worker)):
                found = read_header(join(folder, name))
                if found.pop(_DIGESTS, None) is None or found != stamp:
                    return f"{name} belongs to another checkpoint"
    except StorageError:
        raise
    except ArtifactError as error:
        return str(error)
    return None


class Checkpoint:
    """A complete checkpoint of the current run, from which it can resume.

    Args:
        folder: as `save_checkpoint` of all workers filled it.
        expected: position of the run that goes on; its step and workers do not matter.

    Raises:
        ArtifactError: the folder holds no whole checkpoint, or one of another run, plan or stage;
            the message says which and what to do.
    """

    def __init__(self, folder: Path, expected: Position) -> None:
        damage = find_damage(str(folder))
        if damage is not None:
            raise ArtifactError(f"the checkpoint {str(folder)!r} is incomplete: {damage}")
        self.position = read_position(str(folder))
        self._folder = folder
        for name in ("stage", "run_fingerprint", "plan_fingerprint"):
            saved, asked = getattr(self.position, name), getattr(expected, name)
            if saved != asked:
                raise ArtifactError(
                    f"checkpoint {str(folder)!r} was made with {name} {saved!r}, but this "
                    f"run has {asked!r}; resume with the "
                    f"same{_CAUSES.get(name, f' {name}')}, or start under another --name"
                )
        self._tensors = _open_tensors(folder, self.position.workers)

    def weights(self) -> Mapping[str, Tensor]:
        """Full fp32 weights of the model by name, each read from disk on access."""
        names = {key.rpartition(_SEPARATOR)[0] for key in self._tensors}
        of_model = [name for name in names if not name.startswith(PREFIX)]
        return _Read({name: f"{name}{_SEPARATOR}weight" for name in of_model}, self._tensors)

    def restore(self, engine: StatefulEngine) -> None:
        """Restore the states of the optimiser and random numbers; the engine's model must have been
        built with `weights`.

        With as many workers as before the random numbers go on where they were. Other ones get
        numbers of their own, which differ between the steps at which a run may have stopped.
        """
        names = {key.rpartition(_SEPARATOR)[0]: None for key in self._tensors}
        keys = {key.rpartition(_SEPARATOR)[2] for key in self._tensors}
        engine.restore_optimizer_state(
            {
                name: _Read({key: f"{name}{_SEPARATOR}{key}" for key in keys}, self._tensors)
                for name in names
            }
        )
        if self.position.workers == world_size():
            random = _tensors_in(self._folder / _random_file(rank()))
            restore(dict(_Read({name: name for name in random}, random)))
        else:
            torch.manual_seed((torch.initial_seed() + self.position.step * 7_368_787) % 2**63)
            logger.info(
                "the checkpoint was made by %d workers, but this start has %d workers: "
                "dropout masks will differ from those of an uninterrupted run",
                *(self.position.workers, world_size()),
            )


class _Read(Mapping[str, Tensor]):
    """Mapping that reads tensors lazily from a checkpoint's files, under other names, and checks
    their digests.
    """

    def __init__(self, keys: dict[str, str], places: Mapping[str, tuple[Path, str]]) -> None:
        self._keys, self._places = keys, places

    def __getitem__(self, name: str) -> Tensor:
        key = self._keys[name]
        path, digest = self._places[key]
        with safe_open(path, framework="pt") as file:
            value: Tensor = file.get_tensor(key)
        if tensors_digest({key: value}) != digest:
            raise ArtifactError(
                f"the checkpoint {str(path.parent)!r} is damaged: {key!r} in {path.name} "
                "has changed since it was written. Remove that folder and submit the run "
                "again: it resumes from the previous checkpoint. Check the disk or object "
                "storage for errors"
            )
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def read_position(folder: str) -> Position:
    """Read the step at which a checkpoint was made, with its run and plan.

    Raises:
        ArtifactError: it is not whole.
    """
    try:
        return Position(**json.loads(read_bytes(join(folder, POSITION))))
    except (ValueError, TypeError) as error:
        raise ArtifactError(
            f"{join(folder, POSITION)!r} is not a valid record of a checkpoint: {error}"
        ) from None


def _open_tensors(folder: Path, workers: int) -> dict[str, tuple[Path, str]]:
    """Map each tensor name to the checkpoint file that contains it, and to its digest."""
    found: dict[str, tuple[Path, str]] = {}
    for worker in range(workers):
        found |= _tensors_in(folder / _state_file(worker))
    return found


def _tensors_in(path: Path) -> dict[str, tuple[Path, str]]:
    with safe_open(path, framework="pt") as file:
        digests = json.loads(file.metadata()[_DIGESTS])
        return {key: (path, digests[key]) for key in file.keys()}  # noqa: SIM118  # no mapping


def _stamp(position: Position) -> dict[str, str]:
    """Return step and number of workers, which are written into all files of a checkpoint to show
    that they belong together.

    Workers that are killed may leave files of a step which fewer or more workers then write again.
    """
    return {"step": str(position.step), "workers": str(position.workers)}


def _state_file(worker: int) -> str:
    return f"state-{worker:05d}.safetensors"


def _random_file(worker: int) -> str:
    return f"random-{worker:05d}.safetensors"


def seed_worker(seed: int, number: int) -> None:
    """Seed the random numbers of dropout, differently for each stage and worker."""
    torch.manual_seed((seed * 1_000_003 + number) * 4096 + rank())


def expected_position(stage: str, run_fingerprint: str, plan_fingerprint: str) -> Position:
    """Return the position that this run's checkpoints must have, with a placeholder as its step."""
    return Position(stage, 0, run_fingerprint, plan_fingerprint, world_size())
