"""The guard of a run: mixtures of its model with the untrained one, scored, and a verdict."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import file_name, join, list_files, read_bytes, remove_folder
from rayembed.config.guard import GuardConfig, own_sets_of
from rayembed.config.held_out import held_out_set
from rayembed.config.run import Run
from rayembed.evaluation.guard import Verdict, scored_by, verdict
from rayembed.evaluation.score import ModelScores
from rayembed.evaluation.tables import ScoreKey
from rayembed.models.compressed import read_compression, write_compression
from rayembed.models.merge import Method
from rayembed.pipeline.merge import merge_models
from rayembed.pipeline.run_folders import RunFolders
from rayembed.pipeline.run_scorer import RunScorer
from rayembed.pipeline.runtime import Runtime
from rayembed.progress import doing
from rayembed.registry.model_card import CARD_FILE
from rayembed.training.export import MADE_OF_FILE, upload_model

_MERGED = "-merged-"
"""Stands between a stage and a share in the name of a mixture."""


def mixtures(
    run: Run, folders: RunFolders, scorer: RunScorer, runtime: Runtime
) -> dict[ScoreKey, ModelScores]:
    """Scores of the mixtures of the last stage's model and the untrained one, which are made first;
    none for a run without a guard.

    Raises:
        RayembedError: the models do not fit each other, or a mixture cannot be saved or scored.
    """
    guard, last = run.evaluation.guard, run.stages[-1].name
    found: dict[ScoreKey, ModelScores] = {}
    if guard is None:
        return found
    for share in guard.mixed:
        key = ScoreKey(last, share=share)
        folder = folder_of(folders, key)
        mix = partial(save_mixture, folders.model(scorer.untrained), guard.method, share)
        with doing(f"merging, {share:.0%} of {last}"):
            runtime.export(mix, run, folders.model(last), folder)
        found[key] = scorer.score(folder, f"{last}{_MERGED}{share:g}")
    return found


def remove_mixtures(run: Run, folders: RunFolders, kept: ScoreKey) -> None:
    """Remove all mixtures of the run, also those of former calls, but the one that is kept now and
    those that were kept before, which have a card; others are made again where asked for.
    """
    place = join(folders.storage, "models")
    files = [Path(name) for name in list_files(place, recursive=True)]
    begin = f"{run.stages[-1].name}{_MERGED}"
    made = {file.parts[0] for file in files if file.parts[0].startswith(begin)}
    carded = {file.parts[0] for file in files if file.parts[1:] == (CARD_FILE,)}
    for name in sorted(made - carded - {file_name(folder_of(folders, kept))}):
        remove_folder(join(place, name))


def folder_of(folders: RunFolders, key: ScoreKey) -> str:
    """Folder of a stage's model, of its mixture with the untrained one, or of the untrained one."""
    if key.stage is None:
        return folders.model(RunScorer.untrained)
    return folders.model(key.stage if key.share is None else f"{key.stage}{_MERGED}{key.share:g}")


def share_of(key: ScoreKey) -> float:
    """Share of the trained model in a model of a guarded run: 0 of the untrained one."""
    if key.stage is None:
        return 0.0
    return 1.0 if key.share is None else key.share


def save_mixture(
    base: str, method: Method, share: float, run: Run, trained: str | None, folder: str
) -> None:
    """Save the mixture of two models of the run in a storage folder, unless it is there.

    Args:
        base, trained: folders of the models, in storage.
        method, share: how they are mixed, and the share of the trained one.
    """
    assert trained is not None
    made_of = [read_bytes(join(place, MADE_OF_FILE)).decode() for place in (base, trained)]
    note = json.dumps({"mixture_of": made_of, "method": method, "share": share}, indent=1).encode()
    shares = (share,) if method == "slerp" else (1 - share, share)

    def save(place: Path) -> None:
        merge_models([base, trained], place, method=method, shares=shares)
        # Both have the same zeros, so the mixture has them too.
        if run.model.keep_zeros and (told := read_compression(resolve_model(trained))):
            write_compression(place, told)

    upload_model(folder, note, save)


def judge(run: Run, scores: Mapping[ScoreKey, ModelScores], note: str = "") -> Verdict | None:
    """The verdict on a run's models; None for a run without a guard.

    Args:
        note: what a reader of its general gains should know.
    """
    guard = run.evaluation.guard
    if guard is None:
        return None
    trained = ScoreKey(run.stages[-1].name)
    models = {
        key: scored_by(scored)
        for key, scored in scores.items()
        if key == ScoreKey(key.stage, share=key.share)
    }
    return replace(verdict(models, trained, own_tasks(run), guard), note=note)


def own_tasks(run: Run) -> tuple[str, ...]:
    """Names of the tasks on the user's own data; all others are general."""
    held_out = (held_out_set(dataset.name) for dataset in run.held_out_datasets)
    return (*held_out, *own_sets_of(run.evaluation.guard or GuardConfig(), run.evaluation))
