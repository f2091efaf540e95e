"""Merge trained models of one architecture by averaging weights with given shares, or with the
best-scoring shares.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rayembed.assets.clients import split_options
from rayembed.assets.resolver import resolve, resolve_model
from rayembed.assets.storage import exists, join, write_atomic
from rayembed.config.evaluation import EvaluationPlacement, ModelUnderTest
from rayembed.config.own_sets import Scores
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.display.progress import doing
from rayembed.display.tables import Table, console
from rayembed.errors import ArtifactError
from rayembed.evaluation.score import ModelScores
from rayembed.models.saving.export import check_target
from rayembed.models.saving.merge import (
    MERGE_FILE,
    Method,
    check_density,
    check_shares,
    merge_models,
)
from rayembed.pipeline.evaluate.variants import (
    Scored,
    Variant,
    choose,
    report_files,
    report_tables,
    score_all,
    score_saved,
)
from rayembed.proof.write import write_proof
from rayembed.registry.run_folder import RUN_FILE
from rayembed.training.checkpoints.checkpoint import (
    POSITION,
    Checkpoint,
    checkpoint_on_disk,
    read_position,
)
from rayembed.training.checkpoints.export import export
from rayembed.training.checkpoints.weights import write_weights

_PLACE = re.compile(r"(?P<run>.+)/(?P<stage>[^/]+)/train/(?P<checkpoint>[^/]+)/?")
"""Subfolder of a checkpoint in its run's folder."""

_STORAGE = re.compile(r"(?:s3|gs)://|(?!\w+:)")
"""Prefix of references to folders of storage; those of the hub, a package and
the registry differ."""


class Merged(NamedTuple):
    """One scored model of a merge: a merged candidate, or one of the originals."""

    reference: str
    shares: tuple[float, ...] | None = None
    """Share of each model; None for an original model."""


@dataclass(frozen=True)
class MergeChoice:
    """Result of a merge by scores: the original models, the candidates, and the chosen
    candidate.
    """

    scored: tuple[Scored[Merged], ...]
    kept: Scored[Merged]

    @property
    def tables(self) -> list[Table]:
        """Tables of the originals' and the candidates' scores."""
        return report_tables("Candidates of the merge", self.scored, kept=self.kept)


def merge_given(
    references: Sequence[str],
    output: Path,
    *,
    method: Method,
    shares: Sequence[float] | None,
    density: float | None = None,
) -> None:
    """Save the merged model and its reference vectors (proof) in `output`; see
    `rayembed.models.saving.merge.merge_models`.

    Args:
        references: of models, and of checkpoints, which are exported first.

    Raises:
        RayembedError: as `models_of` and `merge_models`; shares and `output` are looked at first.
    """
    shares = check_shares(method, len(references), shares)
    check_density(method, density)
    check_target(output)
    merge_models(models_of(references), output, method=method, shares=shares, density=density)
    write_proof(output)


def models_of(references: Sequence[str]) -> list[str]:
    """Check references to models, and export the checkpoints among them; return references to
    models. A checkpoint is exported as a model next to those of its run's stages, as
    `<run>/models/<stage>-<checkpoint>`.

    Raises:
        ArtifactError: a checkpoint is damaged, lies in no run's folder, or is of other settings
            than the run's file names.
        RayembedError: a model is not there, or as `rayembed.training.checkpoints.export.export`.
    """
    found = {
        one: _STORAGE.match(one) is not None and exists(join(one, POSITION)) for one in references
    }
    for reference, has_checkpoint in found.items():
        if not has_checkpoint:
            _check_no_removed_checkpoint(reference)
            resolve_model(reference)  # before anything is exported
    return [_exported(one) if found[one] else one for one in references]


def _check_no_removed_checkpoint(reference: str) -> None:
    """Raise if a reference names a checkpoint that its finished run has removed."""
    named = _PLACE.fullmatch(reference) if _STORAGE.match(reference) else None
    if named is None or exists(reference) or not exists(join(named["run"], RUN_FILE)):
        return
    raise ArtifactError(
        f"there is no checkpoint {reference!r}: a finished run keeps only its models and weights. "
        "To merge checkpoints, train the run with placement.keep_states=true under another "
        f"--name; to merge the finished model, name {join(named['run'], 'models', named['stage'])}"
    )


def _exported(checkpoint: str) -> str:
    place, options = str(Path(checkpoint).expanduser().absolute()), ""
    if "://" in checkpoint:
        place, options = split_options(checkpoint)
    named = _PLACE.fullmatch(place)
    folder = "" if named is None else named["run"] + options
    if named is None or not exists(join(folder, RUN_FILE)):
        raise ArtifactError(
            f"the checkpoint {checkpoint!r} is not in its run's folder, so its settings are not "
            "known; give a path of the form <run>/<stage>/train/<checkpoint>"
        )
    run = Run.read(resolve(join(folder, RUN_FILE)))
    model = join(folder, "models", f"{named['stage']}-{named['checkpoint']}")
    with (
        checkpoint_on_disk(place + options) as files,
        tempfile.TemporaryDirectory() as scratch,
    ):
        weights = join(scratch, "weights.safetensors")
        write_weights(weights, _weights(files, run), {"checkpoint": checkpoint})
        export(run, weights, model)
    return model


def _weights(folder: Path, run: Run) -> dict[str, Any]:
    """Read the complete fp32 weights by name from a checkpoint of a run's stage.

    Raises:
        ArtifactError: the checkpoint is not whole, or of other settings than the run's.
    """
    position = read_position(str(folder))
    if position.run_fingerprint != run.fingerprint:
        raise ArtifactError(
            f"the settings of the run have changed since the checkpoint {str(folder)!r} was made: "
            f"the checkpoint has the fingerprint {position.run_fingerprint}, but the settings in "
            f"its run's folder have {run.fingerprint}; restore the settings"
        )
    return dict(Checkpoint(folder, position).weights())


def merge_best(
    references: Sequence[str],
    output: Path,
    *,
    method: Method,
    candidates: Sequence[tuple[float, ...] | None],
    scores: Scores,
    storage: str,
    density: float | None = None,
) -> MergeChoice:
    """Save the candidate with the highest mean score in `output`, with all scores next to it; ties
    go to the first.

    One candidate is on disk at a time; what is scored already is not scored again.

    Args:
        candidates: shares of each, see `rayembed.models.saving.merge.check_shares`.
        storage: where scores are kept.

    Raises:
        RayembedError: as `merge_models`, or a task cannot be scored.
    """
    wanted = [check_shares(method, len(references), shares) for shares in candidates]
    check_density(method, density)
    check_target(output)
    references = models_of(references)
    merge = partial(merge_models, references, method=method, density=density)
    placement = parse(EvaluationPlacement, {"storage_path": storage})
    output.parent.mkdir(parents=True, exist_ok=True)

    def score(label: str, made: Merged) -> ModelScores:
        model = parse(ModelUnderTest, {"reference": made.reference})
        return score_saved(label, model, scores, placement)

    with tempfile.TemporaryDirectory(prefix=".candidate-", dir=output.parent) as folder:

        def candidate(label: str, shares: tuple[float, ...]) -> Merged:
            place = Path(folder) / output.name
            shutil.rmtree(place, ignore_errors=True)
            with doing(f"merging, {label}"):
                merge(place, shares=shares)
            return Merged(str(place), shares)

        variants = []
        for shares in dict.fromkeys(wanted):
            label = f"{method} {', '.join(f'{share:g}' for share in shares)}"
            variants.append(Variant(label, partial(candidate, label, shares)))
        merged = list(score_all(variants, score))
    # After the candidates, so that models which do not fit each other are seen before any score.
    models = [Variant(f"model {n}", partial(Merged, one)) for n, one in enumerate(references, 1)]
    kept = choose(merged, lambda one: one.mean)
    choice = MergeChoice((*score_all(models, score), *merged), kept)
    merge(output, shares=kept.made.shares)
    write_proof(output)
    note: dict[str, Any] = json.loads((output / MERGE_FILE).read_text())
    note["scores"] = {one.label: {**one.scores, "mean": one.mean} for one in choice.scored}
    write_atomic(output / MERGE_FILE, (json.dumps(note, indent=2) + "\n").encode())
    for name, data in report_files("merge", choice.tables).items():
        write_atomic(output / name, data)
    return choice


def print_choice(choice: MergeChoice, references: Sequence[str], output: Path, out: TextIO) -> None:
    """Print the tables and the chosen candidate; warn if a single model beats every candidate."""
    for table in choice.tables:
        console(out).print(table)
    for number, reference in enumerate(references, 1):
        out.write(f"model {number}:      {reference}\n")
    kept, best = choice.kept, choose(choice.scored, lambda one: one.mean)
    out.write(f"Merged model: {output} ({kept.label}, mean {kept.mean:.4f})\n")
    if (best.mean or 0.0) > (kept.mean or 0.0):
        out.write(f"Better:       {best.label} ({best.mean:.4f}), which is no mixture; take it\n")
