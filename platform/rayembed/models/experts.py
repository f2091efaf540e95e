"""Mixture-of-experts layer that replaces an MLP: router, experts, and statistics of their
balance.

Dropless: every token reaches its experts however many chose the same one. A layer's experts may be
shared out among workers, to which rows of tokens then go and come back; routing, probabilities and
statistics know nothing of it. N tokens, E experts, k experts of a token, H hidden size, F the
experts' inner size, M = N·k rows of work, P workers of a group, L = E / P experts of a worker.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from rayembed.distributed.expert_group import ExpertGroup

Products = Literal["auto", "grouped", "loop"]
"""Matrix products of experts: `grouped` in one kernel, `loop` one after the other with one read of
the counts a layer, `auto` by device."""

_GROUPED_CAPABILITIES = (9, 10)
"""Major CUDA capabilities of torch's fused grouped kernel: H100, B200. On others (A100, GeForce 50)
`grouped_mm` is a loop that reads the counts at each product, up to six times a layer and pass."""

_GROUPED_MULTIPLE = 8
"""Row alignment of the kernel: 16 bytes, in bfloat16 elements."""


class MixtureOutput(NamedTuple):
    """Output of a mixture-of-experts layer for N tokens."""

    output: Tensor
    """Output vectors (N, H)."""
    load: Tensor
    """(E,) float32 weighted number of tokens routed to each expert."""
    probability: Tensor
    """(E,) float32 weighted sum of router probabilities over tokens."""
    entropy: Tensor
    """Scalar float32 weighted sum of router entropies in nats."""


class Float32Linear(nn.Linear):
    """Linear layer that computes in float32, whatever the dtype of weight and input."""

    def forward(self, input: Float[Tensor, "N H"]) -> Float[Tensor, "N E"]:
        """Return the outputs in float32."""
        with _without_autocast(input):
            return functional.linear(input.float(), self.weight.float())


class Router(nn.Module):
    """Router of a mixture: a linear layer without bias that gives one logit for each expert."""

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.layer = Float32Linear(hidden_size, num_experts, bias=False)

    def forward(self, tokens_NH: Float[Tensor, "N H"]) -> Float[Tensor, "N E"]:
        """Return the logits of the experts, float32."""
        logits: Tensor = self.layer(tokens_NH)
        return logits


class ExpertMlps(nn.Module):
    """The MLPs of all experts, stored in two matrices; expert e has the rows e·F to (e+1)·F."""

    def __init__(
        self, hidden_size: int, inner_size: int, num_experts: int, *, hidden_bias: bool
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.products: Products = "auto"
        shape = (num_experts * inner_size, hidden_size)
        self.w1 = nn.Parameter(torch.empty(shape))
        self.w2 = nn.Parameter(torch.empty(shape))
        self.b1 = nn.Parameter(torch.empty(shape[0])) if hidden_bias else None

    def forward(
        self, rows_MH: Float[Tensor, "M H"], counts_E: Int[Tensor, " E"]
    ) -> Float[Tensor, "M H"]:
        """Apply each expert to its rows, which are grouped by expert.

        Args:
            counts_E: how many rows each expert has.
        """
        hidden_size = rows_MH.shape[1]
        w1_EFH = self.w1.view(self.num_experts, -1, hidden_size)
        w2_EFH = self.w2.view(self.num_experts, -1, hidden_size)
        b1_EF = None if self.b1 is None else self.b1.view(self.num_experts, -1)
        # A worker of a group may get no row at all, which the kernel is not asked to bear.
        if len(rows_MH) and self._grouped():
            ends_E = counts_E.cumsum(0).to(torch.int32)
            inner_MF = functional.grouped_mm(rows_MH, w1_EFH.transpose(1, 2), offs=ends_E)
            if b1_EF is not None:
                # A product, not copies of the biases: their gradient would be summed by atomic
                # additions in bfloat16, which stop growing at 256 times an addend.
                places_M = torch.arange(len(rows_MH), device=rows_MH.device).unsqueeze(1)
                of_ME = (places_M >= ends_E - counts_E) & (places_M < ends_E)
                inner_MF = torch.addmm(inner_MF, of_ME.to(b1_EF.dtype), b1_EF)
            return functional.grouped_mm(functional.gelu(inner_MF), w2_EFH, offs=ends_E)
        # Unbound at once: of each block taken alone the gradient would be as large as all blocks.
        first, second = w1_EFH.unbind(), w2_EFH.unbind()
        biases = [None] * self.num_experts if b1_EF is None else b1_EF.unbind()
        outputs = []
        for expert, rows in enumerate(torch.split(rows_MH, counts_E.tolist())):
            inner = functional.linear(rows, first[expert], biases[expert])
            outputs.append(functional.gelu(inner) @ second[expert])
        return torch.cat(outputs)

    def of_expert(self, expert: int, rows_RH: Float[Tensor, "R H"]) -> Float[Tensor, "R H"]:
        """Apply one expert to the given rows."""
        inner_size = self.w1.shape[0] // self.num_experts
        own = slice(expert * inner_size, (expert + 1) * inner_size)
        bias = None if self.b1 is None else self.b1[own]
        inner_RF = functional.gelu(functional.linear(rows_RH, self.w1[own], bias))
        return inner_RF @ self.w2[own]

    def keep(self, first: int, number: int) -> None:
        """Discard all but `number` experts, starting with the expert at index `first`."""
        inner_size = len(self.w1) // self.num_experts
        rows = slice(first * inner_size, (first + number) * inner_size)
        for name, whole in list(self.named_parameters()):
            own = nn.Parameter(whole.detach()[rows].clone(), requires_grad=whole.requires_grad)
            setattr(self, name, own)
        self.num_experts = number

    def _grouped(self) -> bool:
        return self.products == "grouped" or (
            self.products == "auto" and has_grouped_kernel(self.w1, self.num_experts)
        )


class Experts(nn.Module):
    """The experts of one layer, and the bias that is added once to each token's weighted sum."""

    def __init__(
        self, hidden_size: int, inner_size: int, num_experts: int, *, hidden_bias: bool
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.group: ExpertGroup | None = None
        self.mlp = ExpertMlps(hidden_size, inner_size, num_experts, hidden_bias=hidden_bias)
        self.bias = nn.Parameter(torch.empty(hidden_size))

    def forward(
        self,
        tokens_NH: Float[Tensor, "N H"],
        weights_Nk: Float[Tensor, "N k"],
        chosen_Nk: Int[Tensor, "N k"],
        counts_E: Int[Tensor, " E"],
    ) -> Float[Tensor, "N H"]:
        """Return the weighted sum of each token's experts, in float32, plus the bias.

        Args:
            counts_E: how many tokens chose each expert.
        """
        if torch.compiler.is_exporting():
            return self._by_places(tokens_NH, weights_Nk, chosen_Nk)
        num_tokens, k = chosen_Nk.shape
        order_M = chosen_Nk.flatten().argsort(stable=True)
        rows_MH = tokens_NH.unsqueeze(1).expand(-1, k, -1).reshape(num_tokens * k, -1)[order_M]
        if self.group is None:
            made_MH = self.mlp(rows_MH, counts_E)
        else:
            made_MH = self._made_by_group(rows_MH, counts_E, self.group)
        # Put back in order and summed row by row: adding into rows would not be deterministic.
        made_NkH = made_MH[_inverse(order_M)].view(num_tokens, k, -1)
        with _without_autocast(made_NkH):
            summed_NH = torch.einsum("nkh,nk->nh", made_NkH.float(), weights_Nk)
        return summed_NH.to(tokens_NH.dtype) + self.bias

    def _by_places(
        self,
        tokens_NH: Float[Tensor, "N H"],
        weights_Nk: Float[Tensor, "N k"],
        chosen_Nk: Int[Tensor, "N k"],
    ) -> Float[Tensor, "N H"]:
        """Same as `forward` in a form that graph export supports: each expert selects its tokens,
        so no count becomes a Python number.
        """
        summed_NH = torch.zeros_like(tokens_NH, dtype=torch.float32)
        for expert in range(self.num_experts):
            chose_Nk = chosen_Nk == expert
            places = chose_Nk.any(dim=1).nonzero().squeeze(1)
            made = self.mlp.of_expert(expert, tokens_NH[places]).float()
            shares = (weights_Nk * chose_Nk).sum(dim=1)[places]
            summed_NH = summed_NH.index_put((places,), made * shares.unsqueeze(1), accumulate=True)
        return summed_NH.to(tokens_NH.dtype) + self.bias

    def spread(self, group: ExpertGroup) -> None:
        """Keep only this worker's share of the experts; rows of other experts will be sent to the
        workers that hold them.
        """
        number = self.num_experts // group.size
        self.mlp.keep(group.place * number, number)
        self.group = group

    def _made_by_group(
        self, rows_MH: Float[Tensor, "M H"], counts_E: Int[Tensor, " E"], group: ExpertGroup
    ) -> Float[Tensor, "M H"]:
        """Send this worker's rows, grouped by expert, to the workers that hold their experts, and
        return the outputs.
        """
        counts_PL = group.exchange_counts(counts_E)
        totals = torch.stack([counts_E.view(group.size, -1).sum(1), counts_PL.sum(1)])
        sent, received = totals.tolist()
        rows_RH = group.exchange_rows(rows_MH, sent, received)
        # They come worker after worker; the products take them expert after expert.
        expert_PL = torch.arange(counts_PL.shape[1], device=counts_PL.device).expand_as(counts_PL)
        expert_R = expert_PL.flatten().repeat_interleave(
            counts_PL.flatten(), output_size=len(rows_RH)
        )
        order_R = expert_R.argsort(stable=True)
        made_RH = self.mlp(rows_RH[order_R], counts_PL.sum(0))
        return group.exchange_rows(made_RH[_inverse(order_R)], received, sent)


class MoeMlp(nn.Module):
    """Mixture-of-experts MLP: y = Σ_k p_k · expert_k(x) + bias; p is the softmax over all experts
    (section 3.2).
    """

    def __init__(
        self, hidden_size: int, inner_size: int, num_experts: int, top_k: int, *, hidden_bias: bool
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = Router(hidden_size, num_experts)
        self.experts = Experts(hidden_size, inner_size, num_experts, hidden_bias=hidden_bias)

    def forward(
        self, tokens_NH: Float[Tensor, "N H"], occurrences_N: Float[Tensor, " N"]
    ) -> MixtureOutput:
        """Return the outputs of the tokens, and their contribution to the router's
        statistics.

        Args:
            occurrences_N: how often each token counts.
        """
        logits_NE = self.router(tokens_NH)
        probability_NE = logits_NE.softmax(dim=-1)
        # Chosen by logits: those of an even router differ where float32's probabilities are equal.
        chosen_Nk = logits_NE.topk(self.top_k, dim=-1).indices
        weights_Nk = probability_NE.gather(-1, chosen_Nk)
        # `one_hot` and `bincount` would look at the values: the host would wait for its device.
        experts_E = torch.arange(probability_NE.shape[1], device=chosen_Nk.device)
        routed_NE = (chosen_Nk.unsqueeze(-1) == experts_E).sum(dim=1)
        output_NH = self.experts(tokens_NH, weights_Nk, chosen_Nk, routed_NE.sum(dim=0))
        detached_NE = probability_NE.detach()
        entropy_N = torch.special.entr(detached_NE).sum(dim=-1)
        with _without_autocast(occurrences_N):
            return MixtureOutput(
                output=output_NH,
                load=occurrences_N @ routed_NE.to(occurrences_N.dtype),
                probability=occurrences_N @ probability_NE,
                entropy=occurrences_N @ entropy_N,
            )


def expert_layers(model: nn.Module) -> list[Experts]:
    """Return the expert layers of a model, in layer order."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def _without_autocast(tensor: Tensor) -> torch.autocast:
    """Return a context that disables autocast on the tensor's device, so that products keep their
    inputs' dtypes.
    """
    kind = tensor.device.type  # of tensors without memory it is not known
    return torch.autocast("cpu" if kind == "meta" else kind, enabled=False)


def has_grouped_kernel(weight: Tensor, num_experts: int) -> bool:
    """Whether torch has a grouped matrix-product kernel for this weight, forward and
    backward.

    Args:
        weight: (E·F, H) of the first layers; F and H are the inner sizes of the two products.
    """
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cuda"
        and torch.cuda.get_device_capability(weight.device)[0] in _GROUPED_CAPABILITIES
        and weight.shape[1] % _GROUPED_MULTIPLE == 0
        and (len(weight) // num_experts) % _GROUPED_MULTIPLE == 0
    )


def _inverse(order: Tensor) -> Tensor:
    """Return the inverse permutation of `order`."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places
