"""Adaptation (masked-language modelling) as each worker trains it, and its exported encoder."""

import json
from dataclasses import dataclass
from pathlib import Path

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import exists
from rayembed.config.adaptation import Adaptation, MaskedTraining
from rayembed.config.placement import Placement
from rayembed.data.mlm.batch import MaskedSteps
from rayembed.data.mlm.plan import SequencePlan
from rayembed.distributed.collectives import rank, world_size
from rayembed.models.contract import load_trainable_state
from rayembed.models.nomic_moe.adaptation import (
    check_adaptable,
    load_masked_language_model,
    save_adapted,
)
from rayembed.models.nomic_moe.masked_language import MaskedLanguageModel
from rayembed.training.export import upload_model
from rayembed.training.masked_step import MaskedStep
from rayembed.training.on_worker import TrainerHooks, Training, train_on_worker
from rayembed.training.validation.submission import whole_weights
from rayembed.training.weights import check_made_of, read_weights, weights_digest, write_weights


@dataclass(frozen=True)
class AdaptationJob:
    """An adaptation, as passed to every worker."""

    run: Adaptation
    plan_folder: str
    weights: str
    """Storage path of the trained weights; their presence marks the job as done."""

    @property
    def loop_config(self) -> MaskedTraining:
        """Steps and optimiser of the adaptation."""
        return self.run.training

    @property
    def placement(self) -> Placement:
        """Workers and hardware of the adaptation."""
        return self.run.placement

    @property
    def pretrained(self) -> tuple[str, ...]:
        """Reference of the pretrained encoder."""
        return (self.run.model.backbone.path,)

    @property
    def start_checkpoint(self) -> None:
        """Always None: an adaptation begins with the pretrained encoder."""
        return

    def is_done(self) -> bool:
        """Whether the weights are in storage, made by this run from this plan.

        Raises:
            ArtifactError: the weights there are of another run or of other texts.
        """
        if not exists(self.weights):
            return False
        check_made_of(self.weights, _made_of(self.run, SequencePlan.open(self.plan_folder)))
        return True

    def train(self, hooks: TrainerHooks) -> None:
        """Train on this worker and write the weights to storage.

        Raises:
            RayembedError: an asset, plan or checkpoint cannot be used.
        """
        run, plan = self.run, SequencePlan.open(self.plan_folder)
        vocabulary = check_adaptable(resolve_model(run.model.backbone.path), run.model)
        steps = MaskedSteps(plan, run.masking, vocabulary, run.seed, rank(), world_size())
        training = Training(
            loop_config=self.loop_config,
            placement=self.placement,
            seed=run.seed,
            number=0,
            dtype=run.model.backbone.dtype,
            run_fingerprint=run.fingerprint,
            plan_fingerprint=plan.fingerprint,
            load=lambda: load_adapted(run, None),
            batches=lambda _: steps,
            run_step=MaskedStep(plan.languages, vocabulary.pad_id),
            of_step=lambda step: _languages(plan, step),
        )
        engine = train_on_worker(training, hooks)
        state = whole_weights(engine)
        if rank() == 0:
            write_weights(self.weights, state, _made_of(run, plan))


def load_adapted(run: Adaptation, weights: str | None) -> MaskedLanguageModel:
    """The run's encoder and head on the CPU with trained weights from storage, or the initial ones.

    Raises:
        RayembedError: the start model or the weights cannot be had or do not fit.
    """
    model = load_masked_language_model(
        resolve_model(run.model.backbone.path),
        run.model,
        max_length=run.corpus.max_length,
        seed=run.seed,
    )
    if weights is not None:
        load_trainable_state(model, read_weights(weights))
    return model


def export_encoder(run: Adaptation, weights: str, folder: str) -> None:
    """Export the adapted encoder to a storage folder, usable as `model.backbone.path` of nomic-moe.

    One that is there whole, of the same run and weights, stays; another is replaced.

    Raises:
        RayembedError: the start model or the weights cannot be had, or the storage refuses it.
    """
    made_of = {"run": run.fingerprint, "weights": weights_digest(weights)}

    def save(place: Path) -> None:
        start = resolve_model(run.model.backbone.path)
        save_adapted(load_adapted(run, weights), place, start, run.model)

    upload_model(folder, json.dumps(made_of, indent=1, sort_keys=True).encode(), save)


def _languages(plan: SequencePlan, step: int) -> str:
    _, codes = plan.read(step, plan.slots(0, 1))
    return f"the languages {', '.join(sorted(set(codes)))}"


def _made_of(run: Adaptation, plan: SequencePlan) -> dict[str, str]:
    return {"run": run.fingerprint, "plan": plan.fingerprint, "start": ""}
