"""DeepSpeed wrapper of a model; the only module that imports DeepSpeed."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from rayembed.config.optimizer import TrainLoopConfig
from rayembed.config.placement import Placement
from rayembed.display.quiet import terminal_stderr, without
from rayembed.distributed.collectives import rank, world_size
from rayembed.distributed.expert_group import ExpertGroup
from rayembed.errors import PlacementError
from rayembed.models.contract import EmbeddingModel, TrainableModel
from rayembed.training.checkpoints.partitioned_states import fragments, states_by_owner
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.hidden_states import StateErrors
from rayembed.training.deepspeed_settings import deepspeed_settings, largest_adapter
from rayembed.training.expert_parallel import SpreadExperts, group_name
from rayembed.training.kept_zeros import KeptZeros
from rayembed.training.optimizer import parameter_groups, set_learning_rates, trained_parameters


class DeepSpeedEngine:
    """A model trained by DeepSpeed: passes, updates, states and full weights."""

    def __init__(
        self,
        model: TrainableModel,
        stage: TrainLoopConfig,
        placement: Placement,
        dtype: str,
        num_workers: int,
        teacher_widths: tuple[int, ...] = (),
        states: StateErrors | None = None,
    ) -> None:
        deepspeed = _deepspeed()
        self.model = model
        self._zero_stage = placement.zero_stage
        self._bf16 = dtype == "bfloat16"
        self._experts = SpreadExperts.of(model)
        # Embedding models have several kinds of passes, which must go through the engine alike.
        module: nn.Module = model
        self._loss = None
        if isinstance(model, EmbeddingModel):
            module = EngineModule(model, stage.loss, teacher_widths, states)
            self._loss = module.loss
        self._zeros = KeptZeros(model, self._own)
        groups = parameter_groups(model, self._loss, stage.optimizer)
        self._states = {p: group["states"] for group in groups for p in group["params"]}
        optimizer = stage.optimizer.build(groups, bfloat16=self._bf16)
        trained = [p for _, p in self._trained()]
        num_trained = sum(p.numel() for p in trained)
        adapter = largest_adapter(model)
        settings = deepspeed_settings(stage, placement, dtype, num_workers, num_trained, adapter)
        if self._experts is not None:
            module.add_module("experts", _sign_of_experts(self._experts.num_experts))
        self._clipping = 0.0
        if not self._zero_stage and not self._bf16:
            # DeepSpeed does not tell the norm here, would clip to NaN by one that is not finite,
            # and with experts by the mean of the workers' norms.
            self._clipping = stage.optimizer.gradient_clipping
            settings["gradient_clipping"] = 0.0
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=module,
            model_parameters=trained,
            optimizer=optimizer,
            config=settings,
            dist_init_required=not torch.distributed.is_initialized(),
        )
        # DeepSpeed allocates optimiser states by a step with zero gradients; in stage 0 with bf16
        # that step stays counted, and the first real ones come out at 0.74 of their size.
        for state in self._inner().state.values():
            if "step" in state:
                state["step"].zero_()
        self._reduces_once = placement.reduce_once and self._zero_stage >= 2
        self._unreduced, self._adding_up = ExitStack(), False
        if self._bf16:
            self._sum_in_fp32()
        if stage.optimizer.splits_matrices and self._zero_stage:
            self._inner().fragments = fragments(self._optimizer)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Detach DeepSpeed from the model; the full weights are not available afterwards.

        Its hooks on gradients hold weights, gradients and optimiser states in circles through
        autograd's own nodes, which Python's collector does not see. ZeRO-3's on modules stay.
        """
        self._engine.destroy()

    @property
    def forward(self) -> torch.nn.Module:
        """The module to call for forward passes."""
        engine: torch.nn.Module = self._engine
        return engine

    @property
    def has_states(self) -> bool:
        """Whether the optimiser has allocated its states, which happens in the first update."""
        return any(self._inner().state.values())

    def backward(self, loss: Tensor, last: bool) -> None:
        """Backpropagate a scalar; gradients are reduced at the step's last call, or at each one in
        stages 2 and 3 without `placement.reduce_once`.
        """
        engine = self._engine
        engine.set_gradient_accumulation_boundary(last)
        if not self._zero_stage:
            with engine.no_sync():
                engine.backward(loss)
            if last:
                self._reduce_whole_gradients()
            return
        if self._reduces_once and not last and not self._adding_up:
            self._unreduced.enter_context(engine.coalesce_grad_reduction())
            self._adding_up = True
        self._begin_pass()
        engine.backward(loss)
        if last and self._adding_up:
            self._unreduced.close()
            self._adding_up = False
            engine.set_gradient_accumulation_boundary(True)  # closing took it back

    def _begin_pass(self) -> None:
        """Start a new backward pass in DeepSpeed, so that it adds to earlier gradients.

        DeepSpeed counts it at the next forward pass, and graphs that are kept have none between two
        backward passes: in ZeRO-3 each gradient would replace the one before. Idempotent.
        """
        self._optimizer.clear_backward_seen_flag()

    def _sum_in_fp32(self) -> None:
        """Make bf16 gradients add up in fp32, as bf16 would lose small ones."""
        for _, p in self._trained():
            p.grad = None  # what is left of DeepSpeed's first step
            p.grad_dtype = torch.float32
        if self._zero_stage in (1, 2):
            # What it stages for a reduction would be bf16, and in stage 1 what comes back.
            self._optimizer._gradient_reduction_buffer_dtype = lambda: torch.float32
            self._optimizer.gradient_accumulation_dtype = torch.float32
        elif not self._zero_stage:
            # Its own asks the device for the sum of each gradient.
            self._optimizer.overflow_checker.has_overflow_serial = _not_finite

    def _reduce_whole_gradients(self) -> None:
        """Average unpartitioned gradients over workers."""
        for _, p in self._trained():
            if p.grad is None:  # all workers reduce as many, and DeepSpeed's zeros would be bf16
                p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
        self._engine.allreduce_gradients()

    def step(self, learning_rate_factor: float) -> tuple[float, float]:
        """Update the weights; return the learning rate and the unclipped gradient norm.

        Where the norm is not finite, nothing is updated and no update counted; it is the same on
        all workers. DeepSpeed does so by itself but for fp32 without partitions.
        """
        rate = set_learning_rates(self._optimizer, learning_rate_factor)
        norm = self._norm_without_partitions()
        if norm is not None and not math.isfinite(norm):
            self._engine.zero_grad()  # what has no gradient is not updated
        elif norm is not None and self._clipping:
            trained = [p for _, p in self._trained()]
            torch.nn.utils.clip_grads_with_norm_(trained, self._clipping, torch.tensor(norm))
        self._engine.step()
        from deepspeed.utils import safe_get_local_fp32_param

        masters = {} if self._zero_stage else self._masters()
        self._zeros.restore(self._zero_stage, masters, safe_get_local_fp32_param)
        if norm is None:
            norm = float(self._engine.get_global_grad_norm())
        if self._zero_stage == 3:
            self._clear_partitioned_gradients()
        return rate, norm

    def _norm_without_partitions(self) -> float | None:
        """Norm of unpartitioned gradients, where DeepSpeed does not report it."""
        if self._zero_stage or self._bf16:
            return None
        if self._experts is not None:
            return float(self._experts.gradient_norm(p for _, p in self._trained()))
        grads = [p.grad for _, p in self._trained() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))

    def _clear_partitioned_gradients(self) -> None:
        """Set ZeRO-3's gradient buffers to zero.

        It copies into them in a step's first backward pass and adds in later ones, so a parameter
        that the first micro-batch does not use (a context encoder, an expert without tokens) would
        be added to what the step before left there.
        """
        from deepspeed.utils import safe_set_local_grad

        for _, p in self._trained():
            partition: Tensor = p.ds_tensor  # type: ignore[attr-defined] # set by DeepSpeed
            safe_set_local_grad(p, torch.zeros_like(partition))

    def trainable_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full weights of trained parameters; all workers iterate together.

        One after the other, so that ZeRO-3 never holds more than one of them whole.
        """
        import deepspeed

        for name, p in trained_parameters(self.model):
            with deepspeed.zero.GatheredParameters([p], enabled=self._zero_stage == 3):
                yield name, self._whole(p, p.detach())

    def optimizer_state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield names and full fp32 states, with `weight` and `step`, on all workers
        together.

        It is the same for all ZeRO stages and numbers of workers: what a checkpoint holds.
        """
        for name, p, state in self._own_states():
            whole = {key: self._whole(p, value) for key, value in state.items() if key != "step"}
            yield name, {**whole, "step": state["step"]}

    def written_states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the states that this worker writes to a checkpoint, on all workers
        together.

        In stages 1 and 2 the worker whose partition has a parameter writes it, and nothing is
        sent; only what lies in several partitions is reduced, to the one that has most of it. With
        experts on several workers (`placement.expert_parallel`) every state is all-reduced.
        """
        if self._zero_stage in (1, 2) and self._experts is None:
            self._link_states()
            step = self._updates()
            for name, state in states_by_owner(self._trained(), self._states):
                yield name, {**state, "step": step}
            return
        sizes = [0] * world_size()
        for name, state in self.optimizer_state():
            writer = sizes.index(min(sizes))  # the same on all workers
            sizes[writer] += state["weight"].numel()
            if writer == rank():
                yield name, state

    def _own_states(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Tensor]]]:
        """Yield this worker's part of each parameter's optimiser state."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if not self._zero_stage:
            masters = self._masters()
            for name, p in self._trained():
                master = masters[p]
                state = self._inner().state.get(master, {})
                own = {key: state.get(key, torch.zeros_like(master)) for key in self._states[p]}
                step = state.get("step", torch.zeros(()))
                yield name, p, {**own, "weight": master.detach(), "step": step}
            return
        self._link_states()
        for name, p in self._trained():
            own = {key: safe_get_full_optimizer_state(p, key) for key in self._states[p]}
            weight = safe_get_full_fp32_param(p)
            yield name, p, {**own, "weight": weight, "step": self._updates()}

    def restore_optimizer_state(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load this worker's share of saved states, as `optimizer_state` yields them.

        The model must have been built with the saved weights: in bf16 its own copy of them is not
        written here. The loss's is, which is built with its initial values.
        """
        self._restore_loss(saved)
        if not self._zero_stage:
            masters = self._masters()
            for name, p in self._trained():
                master, of = masters[p], saved[name]
                master.data.copy_(self._own(p, of["weight"]))
                own = {key: self._own(p, of[key]).to(p.device) for key in self._states[p]}
                self._inner().state[master] = {**own, "step": of["step"].to(p.device)}
            return
        self._link_states()
        for name, p in self._trained():
            for key in ("weight", *self._states[p]):
                self._restore_partition(p, key, self._own(p, saved[name][key]))
        updates = max(float(saved[name]["step"]) for name, _ in self._trained())
        for state in self._inner().state.values():
            state["step"].fill_(updates)

    def _restore_loss(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        import deepspeed

        partitioned = self._zero_stage == 3
        for name, p in trained_parameters(self._loss):
            with deepspeed.zero.GatheredParameters([p], modifier_rank=0, enabled=partitioned):
                p.data.copy_(saved[name]["weight"])

    def _whole(self, p: nn.Parameter, value: Tensor) -> Tensor:
        return value if self._experts is None else self._experts.whole(p, value)

    def _own(self, p: nn.Parameter, whole: Tensor) -> Tensor:
        return whole if self._experts is None else self._experts.own(p, whole)

    def _masters(self) -> dict[nn.Parameter, Tensor]:
        """Map each parameter to the tensor updated in stage 0: itself, or its fp32 copy."""
        if not self._bf16:
            return {p: p for _, p in self._trained()}
        groups = zip(self._optimizer.fp16_groups, self._optimizer.fp32_groups, strict=True)
        return {p: copy for own, copies in groups for p, copy in zip(own, copies, strict=True)}

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [*trained_parameters(self.model), *trained_parameters(self._loss)]

    def _inner(self) -> torch.optim.Optimizer:
        """Return torch's optimiser inside DeepSpeed's, which works on flat partitions."""
        inner: torch.optim.Optimizer = getattr(self._optimizer, "optimizer", self._optimizer)
        return inner

    def _updates(self) -> Tensor:
        """Return the number of updates so far, which is the same for all partitions."""
        steps = [state["step"].float().cpu() for state in self._inner().state.values()]
        return torch.stack(steps).max() if steps else torch.zeros(())

    def _partitions(self) -> list[tuple[Tensor, tuple[str, ...]]]:
        """Return this worker's flat partitions, each with the names of its optimiser states."""
        groups = self._inner().param_groups
        if self._zero_stage < 3:
            return [(flat, group["states"]) for group in groups for flat in group["params"]]
        # Stage 3 cuts groups further, and empties the optimiser's own between its steps.
        flat = self._optimizer.fp32_partitioned_groups_flat
        of_group = self._optimizer.sub_group_to_group_id
        return [(part, groups[of_group[i]]["states"]) for i, part in enumerate(flat)]

    def _link_states(self) -> None:
        """Create missing optimiser states, and refresh DeepSpeed's views of them.

        Stages 1 and 2 have them from their first step on, and link them after the update of the
        first parameter group, when the other groups do not have any yet.
        """
        inner = self._inner()
        for partition, names in self._partitions():
            if not inner.state[partition]:
                made = {key: torch.zeros_like(partition) for key in names}
                inner.state[partition] = {**made, "step": partition.new_zeros(())}
        if hasattr(self._optimizer, "_hp_optimizer_states_linked"):
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _restore_partition(self, p: nn.Parameter, key: str, value: Tensor) -> None:
        from deepspeed import utils

        value = value.to(p.device)
        if self._zero_stage < 3:
            if key == "weight":
                utils.safe_set_full_fp32_param(p, value)
            else:
                utils.safe_set_full_optimizer_state(p, value, key)
            return
        # The setter of whole values takes only sizes that the number of workers divides.
        share: int = p.ds_tensor.numel()  # type: ignore[attr-defined] # set by DeepSpeed
        mine = value.flatten()[rank() * share : (rank() + 1) * share]
        mine = nn.functional.pad(mine, (0, share - mine.numel()))
        if key == "weight":
            utils.safe_set_local_fp32_param(p, mine)
        else:
            utils.safe_set_local_optimizer_state(p, mine, key)


def _not_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a gradient has a number that is not finite; synchronises with the GPU once."""
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
    return not bool(torch.stack(norms).isfinite().all())


def expert_group(size: int) -> ExpertGroup:
    """Create this worker's expert-parallel group; all workers must call it together.

    Workers of a group have consecutive ranks: those of one node stay together.

    Raises:
        PlacementError: the workers are not a multiple of it.
    """
    if world_size() % size:
        raise PlacementError(
            f"placement.expert_parallel={size} does not divide the number of workers, "
            f"{world_size()}; set it to a divisor of that number, or start a multiple of "
            f"{size} workers"
        )
    deepspeed = _deepspeed()
    groups = deepspeed.utils.groups
    deepspeed.init_distributed()
    groups._create_expert_and_data_parallel(size)
    return ExpertGroup(groups._get_expert_parallel_group(group_name(size)))


def _sign_of_experts(num_experts: int) -> nn.Module:
    """Make a module without weights by which DeepSpeed recognises that the model has
    experts.

    It looks for modules of its own class, and without one it fails on marked parameters.
    """
    from deepspeed.moe.layer import MoE

    class Sign(MoE):  # type: ignore[misc] # DeepSpeed is not typed
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = num_experts

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            """Do nothing, because the process groups exist already."""

    sign: nn.Module = Sign()
    return sign


def _deepspeed() -> Any:
    """Import DeepSpeed without MLflow, which only its unused autotuner needs (1.5 CPU s).

    Its reduction for inference is left out: compiling it takes a minute and a C++ compiler.
    """
    with without("mlflow"), terminal_stderr():
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
