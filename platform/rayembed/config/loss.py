"""Base class of loss settings, and the table of available losses.

A loss is one file of `losses/`: its settings, the parameters that it trains if it has any, and a
pure function of embeddings and targets. `docs/own_loss.md` adds one.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from rayembed.config.settings import Settings
from rayembed.config.table import SettingsTable
from rayembed.config.types import Distinct, SmallPrecision

Need = Literal["similarity", "teacher_scores", "teacher_vectors"]
"""Data that rows must have in addition to their texts: the graded similarity of query and document,
scores of the positive and the hard negatives by a teacher, or vectors of all texts by the stage's
teachers."""


@dataclass(frozen=True)
class Widths:
    """Vector widths of the trained model and its teachers, which determine the shapes of a loss's
    parameters.
    """

    student: int
    """Full width of the trained model."""
    teachers: tuple[int, ...] = ()
    """Widths of the stage's teachers, where the loss needs their vectors."""


class LossConfig(Settings):
    """Base class for the settings of a loss over embeddings.

    Losses derive from `losses.contract.Contrastive` or `losses.contract.Pairwise`.
    """

    kind: str
    dimensions: Distinct[PositiveInt] = ()
    """Widths below the full one that are trained too, on truncated and renormalised vectors
    (Matryoshka, arXiv 2205.13147). The losses of all widths are summed with equal weight, as in
    Nomic's code, so each further width increases the gradient."""
    precisions: Distinct[SmallPrecision] = ()
    """Number types trained in addition to float32, at each width: queries and documents are scored
    as a search in that type has them, with gradients passed straight through the rounding. The
    losses are summed with equal weight, as those of `dimensions`."""

    takes_candidates: ClassVar[bool] = True
    """Whether a query is compared with documents besides its positive, which must then exist."""
    takes_positives: ClassVar[bool] = False
    """Whether the loss reads `Candidates.further_positives`."""
    row_blocks: ClassVar[bool] = False
    """Whether a row's loss does not depend on other rows' queries, so that blocks of rows are
    computed separately."""

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the loss's trained parameters, which can depend on the widths; most losses have
        none.

        They have a group of their own in the optimiser (`optimizer.loss_learning_rate`), stand in
        checkpoints, start again in each stage and do not belong to the trained model.
        """
        return ()

    @property
    def needs(self) -> frozenset[Need]:
        """Names of data that the loss reads besides texts, such as teacher vectors; rows must have
        it.
        """
        return frozenset()

    @property
    def reads_in_batch(self) -> bool:
        """Whether other rows of the batch affect the loss of a row."""
        return True

    def check_batch(self, in_batch_negatives: bool, num_negatives: int, num_positives: int) -> None:
        """Check that batches hold what the loss compares, and nothing that it does not read.

        The arguments are the settings of the stage's `batch`.

        Raises:
            ValueError: they do not; the message begins after the name of the stage.
        """
        if num_positives > 1 and not self.takes_positives:
            raise ValueError(
                f"batch.num_positives is {num_positives}, but the loss {self.kind!r} reads "
                "one positive of a row; set batch.num_positives=1, or use the loss infonce"
            )

    def initial_parameters(self, widths: Widths) -> dict[str, Any]:
        """Initial float32 tensors of the loss's `parameter_names`, in their order; the same in
        every process.

        Args:
            widths: of the vectors, for parameters whose shapes depend on them. Where these need
                none of a parameter, it is left out.

        Raises:
            ConfigError: the loss cannot compare vectors of these widths.
        """
        return {}


LOSSES = SettingsTable(
    "rayembed.losses",
    LossConfig,
    (
        "rayembed.losses.infonce:InfoNCE",
        "rayembed.losses.siglip:SigLIP",
        "rayembed.losses.cosent:CoSENT",
        "rayembed.losses.listwise_kl:ListwiseKL",
        "rayembed.losses.margin_mse:MarginMSE",
        "rayembed.losses.vector_distillation:VectorDistillation",
        "rayembed.losses.similarity_distillation:SimilarityDistillation",
    ),
    default="infonce",
)
"""All losses by their `kind`."""
