"""The learning rate as a pure function of the step, so that a resumed run needs no state for it."""

from rayembed.config.train_loop import TrainLoopConfig


def learning_rate_factor(step: int, loop_config: TrainLoopConfig) -> float:
    """Fraction of the peak learning rate at a step, counted from 0.

    Linear warm-up from 1/warmup_steps to 1, then the schedule, which would reach zero one
    step after the last, or at `decay_steps`.
    """
    warmup = loop_config.optimizer.warmup(loop_config.steps)
    if step < warmup:
        return (step + 1) / warmup
    end = loop_config.optimizer.decay_steps or loop_config.steps
    progress = (step - warmup) / max(end - warmup, 1)
    return loop_config.optimizer.schedule.factor(progress)
