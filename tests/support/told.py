"""A trainer's callback made of functions, for tests that look at some of its moments."""

from rayembed.training.trainer import Callback


def nothing(_):
    return None


class Told(Callback):
    """Calls what it is given; the checkpoint's function gets its step alone."""

    def __init__(
        self, *, on_step=nothing, on_checkpoint=nothing, ends_after=nothing, saves_now=lambda: False
    ):
        self.on_step_end = on_step
        self.on_checkpoint = lambda step, folder: on_checkpoint(step)
        self.should_stop = lambda step: bool(ends_after(step))
        self.should_save = lambda step: saves_now()


def in_turn(make, first, last, processes, named):
    """A stream that makes each batch when it is asked for."""
    return (make(step) for step in range(first, last))
