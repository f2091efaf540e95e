"""InfoNCE: softmax cross-entropy of the positive among the candidates that a mask allows.

B queries, N candidates, D embedding width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from rayembed.config.settings import Settings
from rayembed.config.types import Distinct
from rayembed.losses.contract import Candidates, Contrastive, Direction, scalar, similarities

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from rayembed.config.loss import Widths
    from rayembed.losses.contract import FurtherNegatives, Parameters

SMALLEST_TEMPERATURE = 0.01
"""Lower limit of a trained temperature, as CLIP's (arXiv 2103.00020, section 2.5)."""

_LOG_TEMPERATURE = "log_temperature"


class Hardness(Settings):
    """Weight of a negative in the softmax that grows with its similarity to the query."""

    strength: PositiveFloat = 5.0
    """α: a negative's term is multiplied by exp(α·cosine), whose gradient is left out.
    EmbeddingGemma uses 5 for hard negatives, LLaVE 9 for all."""
    of: Literal["hard", "all"] = "hard"
    """Negatives that are weighted. `hard`: the query's own hard negatives (EmbeddingGemma, arXiv
    2509.20354). `all`: all candidates but the positive (LLaVE, arXiv 2503.04812), without texts of
    further directions."""


class WithInfoNCE(Contrastive):
    """Base class of losses that are or contain InfoNCE, with the settings that change it."""

    directions: Distinct[Direction] = Field(default=(), exclude_if=lambda it: not it)
    """Further negatives from other rows: `document_to_query` compares a row's positive with other
    queries, `query_to_query` its query with other queries, `document_to_document` its positive with
    other rows' documents. Known positives and equal texts are left out, as among the candidates."""
    partition: Literal["joint", "per_direction"] = Field(
        default="joint", exclude_if=lambda it: it == "joint"
    )
    """How further directions count. `joint`: in the one softmax of the row (GTE, arXiv 2308.03281;
    Qwen3 Embedding, arXiv 2506.05176). `per_direction`: `document_to_query` has a softmax of its
    own, and the row's loss is the mean of both (the symmetric loss of CLIP, arXiv 2103.00020)."""
    hardness: Hardness | None = Field(default=None, exclude_if=lambda it: it is None)
    """Weight of negatives by their similarity; None: all weigh the same."""
    focal: float = Field(default=0.0, ge=0, exclude_if=lambda it: it == 0)
    """γ: a row's loss is multiplied by (1 - p)^γ, where p is the probability of its positive, so
    that rows which the model solves count less (arXiv 1708.02002; in an embedder KaLM-Embedding-V2,
    arXiv 2506.20923). 0: all rows count the same."""
    learnt_temperature: bool = Field(default=False, exclude_if=lambda it: not it)
    """Whether to train the temperature of InfoNCE, which then is its initial value (CLIP, arXiv
    2103.00020). It does not fall below 0.01."""

    @property
    def initial_temperature(self) -> float:
        """Temperature of InfoNCE as set, at which a trained one begins."""
        raise TypeError(f"{type(self).__name__} does not define `initial_temperature`")

    @property
    def further_directions(self) -> tuple[Direction, ...]:
        """Directions besides query to document whose negatives the loss reads."""
        return self.directions

    @property
    def marks_hard_negatives(self) -> bool:
        """Whether only the query's own hard negatives are weighted by hardness."""
        return self.hardness is not None and self.hardness.of == "hard"

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The logarithm of the temperature, if it is trained."""
        return (_LOG_TEMPERATURE,) if self.learnt_temperature else ()

    def initial_parameters(self, widths: Widths) -> dict[str, Any]:
        """Return the logarithm of the temperature, if it is trained."""
        if not self.learnt_temperature:
            return {}
        return {_LOG_TEMPERATURE: scalar(math.log(self.initial_temperature))}

    def temperature_of(self, parameters: Parameters) -> float | Float[Tensor, ""]:
        """Return the current temperature of InfoNCE."""
        if not self.learnt_temperature:
            return self.initial_temperature
        return _at_least(parameters[_LOG_TEMPERATURE], math.log(SMALLEST_TEMPERATURE)).exp()

    def check_batch(self, in_batch_negatives: bool, num_negatives: int, num_positives: int) -> None:
        """Check that there are other rows and a single positive for the directions, and hard
        negatives for their weight.

        Raises:
            ValueError: there are not.
        """
        super().check_batch(in_batch_negatives, num_negatives, num_positives)
        if self.directions and not in_batch_negatives:
            raise ValueError(
                f"loss.directions={list(self.directions)} compares texts of different rows, but "
                "batch.in_batch_negatives=false keeps rows apart; set it to true, or set "
                "loss.directions=[]"
            )
        if self.directions and num_positives > 1:
            raise ValueError(
                f"loss.directions={list(self.directions)} compares the one positive that a row "
                f"trains, but batch.num_positives is {num_positives}; set it to 1, or set "
                "loss.directions=[]"
            )
        if self.marks_hard_negatives and not num_negatives:
            raise ValueError(
                "loss.hardness.of=hard weighs hard negatives, but batch.num_negatives is 0; set it "
                "above 0, or set loss.hardness.of=all"
            )

    def info_nce_of(
        self, queries_BD: Float[Tensor, "B D"], candidates: Candidates, parameters: Parameters
    ) -> Float[Tensor, " B"]:
        """Compute InfoNCE of each query with these settings.

        Of several positives it is the mean over them, each among the same negatives without the
        others; SupCon (arXiv 2004.11362, equation 2) leaves the others among the negatives.
        """
        from torch.nn import functional

        weighted = None
        if self.hardness is not None:
            weighted = candidates.mask_BN if self.hardness.of == "all" else candidates.hard_BN
            assert weighted is not None
            weighted = weighted.scatter(1, candidates.positive_B.unsqueeze(1), False)
        logits = info_nce_logits(
            queries_BD,
            candidates.vectors,
            candidates.mask_BN,
            self.temperature_of(parameters),
            further=candidates.further,
            weighted_BN=weighted,
            strength=0.0 if self.hardness is None else self.hardness.strength,
        )
        positive_B, positives = candidates.positive_B, candidates.further_positives
        if positives is None:
            loss_B = of_logits(logits, positive_B, joint=self.partition == "joint")
            return focal(loss_B, self.focal) if self.focal else loss_B
        cosines_BP = similarities(queries_BD, positives.vectors_BPD)
        loss_BP = of_positives(logits, positive_B, cosines_BP / self.temperature_of(parameters))
        if self.focal:
            loss_BP = focal(loss_BP, self.focal)
        there_BP = functional.pad(positives.mask_BP, (1, 0), value=True)
        return loss_BP.masked_fill(~there_BP, 0.0).sum(dim=1) / there_BP.sum(dim=1)

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.partition == "per_direction" and self.directions != ("document_to_query",):
            raise ValueError(
                f"partition=per_direction with directions={list(self.directions)}: a softmax of "
                "its own has a positive only from document to query; set "
                "directions=[document_to_query], or partition=joint"
            )
        if self.learnt_temperature and self.initial_temperature < SMALLEST_TEMPERATURE:
            raise ValueError(
                f"learnt_temperature with an initial temperature of {self.initial_temperature:g}: "
                f"a trained temperature does not fall below {SMALLEST_TEMPERATURE:g}; begin with "
                "that or more, or set learnt_temperature=false"
            )
        return self


class InfoNCE(WithInfoNCE):
    """Softmax cross-entropy of the positive among all candidates under the mask."""

    takes_positives: ClassVar[bool] = True

    kind: Literal["infonce"] = "infonce"
    temperature: PositiveFloat = 0.02
    """Temperature that divides cosine similarities. NV-Embed does not state its own."""

    @property
    def initial_temperature(self) -> float:
        """Temperature of InfoNCE as set."""
        return self.temperature

    def of_rows(
        self, queries_BD: Float[Tensor, "B D"], candidates: Candidates, parameters: Parameters
    ) -> Float[Tensor, " B"]:
        """Compute the loss of each query; see `info_nce`."""
        return self.info_nce_of(queries_BD, candidates, parameters)


def _at_least(value: Float[Tensor, ""], bound: float) -> Float[Tensor, ""]:
    """Limit a value from below; below the bound its gradient is kept where it leads up again."""
    limited = value.detach().clamp(min=bound)
    if not value.requires_grad:
        return limited
    passed = limited + (value - value.detach())  # the identity's gradient
    is_below = value.detach() < bound

    def leads_up(gradient: Tensor) -> Tensor:
        return gradient.where(~is_below, gradient.clamp(max=0))

    passed.register_hook(leads_up)  # type: ignore[no-untyped-call]
    return passed


def info_nce(
    queries_BD: Float[Tensor, "B D"],
    candidates: Float[Tensor, "N D"] | Float[Tensor, "B N D"],
    positive_B: Int[Tensor, " B"],
    mask_BN: Bool[Tensor, "B N"],
    temperature: float | Float[Tensor, ""],
) -> Float[Tensor, " B"]:
    """Loss of each query: negative log-probability of its positive among its candidates.

    -log( exp(q·d⁺/τ) / Σ_{d in mask} exp(q·d/τ) )   (arXiv 1807.03748, eq. 4)

    Args:
        queries_BD: unit length; cast to float32, as all of the loss.
        candidates: unit length, the same for all queries or each query's own.
        positive_B: place of each query's positive among the candidates; its mask must be True.
        mask_BN: which candidates stand in the denominator.
        temperature: τ.
    """
    return of_logits(info_nce_logits(queries_BD, candidates, mask_BN, temperature), positive_B)


def info_nce_logits(
    queries_BD: Float[Tensor, "B D"],
    candidates: Float[Tensor, "N D"] | Float[Tensor, "B N D"],
    mask_BN: Bool[Tensor, "B N"],
    temperature: float | Float[Tensor, ""],
    *,
    further: Sequence[FurtherNegatives] = (),
    weighted_BN: Bool[Tensor, "B N"] | None = None,
    strength: float = 0.0,
) -> list[Float[Tensor, "B _"]]:
    """Logits of each query's candidates, then of each further direction; -inf where masked.

    A logit is a cosine over τ. To that of a weighted candidate α·sg(q·d) is added, where sg stops
    the gradient, which multiplies its term by exp(α·q·d) (arXiv 2509.20354, 2503.04812).

    Args:
        queries_BD, candidates, mask_BN, temperature: as in `info_nce`.
        further: negatives of other directions.
        weighted_BN: candidates that hardness weighs; None: none.
        strength: α.
    """
    cosines_BN = similarities(queries_BD, candidates)
    logits_BN = cosines_BN / temperature
    if weighted_BN is not None:
        logits_BN = logits_BN + strength * cosines_BN.detach().masked_fill(~weighted_BN, 0.0)
    found = [logits_BN.masked_fill(~mask_BN, -math.inf)]
    for one in further:
        cosines_BN = similarities(one.anchors_BD, one.others_ND)
        found.append((cosines_BN / temperature).masked_fill(~one.mask_BN, -math.inf))
    return found


def of_logits(
    logits: Sequence[Float[Tensor, "B _"]], positive_B: Int[Tensor, " B"], *, joint: bool = True
) -> Float[Tensor, " B"]:
    """Loss of each query from its logits: log Z - q·d⁺/τ.

    Z sums the candidates' terms and, if `joint`, those of all directions, each pair of texts once
    (arXiv 2308.03281, which counts that of query and positive twice, and 2506.05176). Otherwise
    each direction has a Z of its own, exp(q·d⁺/τ) and its terms, and log Z is the mean over all.

    Args:
        logits: as `info_nce_logits` gives them.
    """
    logits_BN, *others = logits
    picked_B1 = logits_BN.gather(1, positive_B.unsqueeze(1))
    if not others:
        return logits_BN.logsumexp(dim=1) - picked_B1.squeeze(1)
    import torch

    if joint:
        return torch.cat([*logits], dim=1).logsumexp(dim=1) - picked_B1.squeeze(1)
    sides = [logits_BN, *(torch.cat([picked_B1, one], dim=1) for one in others)]
    log_z = torch.stack([one.logsumexp(dim=1) for one in sides]).mean(dim=0)
    return log_z - picked_B1.squeeze(1)


def of_positives(
    logits: Sequence[Float[Tensor, "B _"]],
    positive_B: Int[Tensor, " B"],
    further_BP: Float[Tensor, "B P"],
) -> Float[Tensor, "B 1+P"]:
    """Loss of each positive of a query, among the query's negatives without its other positives.

    log(1 + Z⁻ / exp(q·d⁺/τ)), where Z⁻ sums the terms of the negatives.

    Args:
        logits: as `info_nce_logits` gives them.
        further_BP: logits of the further positives.
    """
    import torch
    from torch.nn import functional

    place_B1 = positive_B.unsqueeze(1)
    positives_BP = torch.cat([logits[0].gather(1, place_B1), further_BP], dim=1)
    negatives = [logits[0].scatter(1, place_B1, -math.inf), *logits[1:]]
    log_z_B1 = torch.cat(negatives, dim=1).logsumexp(dim=1, keepdim=True)
    return functional.softplus(log_z_B1 - positives_BP)


def focal(loss_B: Float[Tensor, " B"], exponent: float) -> Float[Tensor, " B"]:
    """Weight each row's loss -log p by (1 - p)^γ (arXiv 1708.02002, eq. 4).

    Args:
        exponent: γ.
    """
    import torch

    # Of a loss of 0 the power's own derivative would be infinite.
    wrong_B = (-torch.expm1(-loss_B)).clamp(min=1e-9)
    return wrong_B.pow(exponent) * loss_B
