"""Which documents of a global batch are the context of its texts."""

import numpy as np

from rayembed.training.contrastive.collated import context_rows


def draw(num_rows=20, max_context=6, *, seed=1, stage="s", step=3):
    return context_rows(num_rows, max_context, seed=seed, stage=stage, step=step).tolist()


def test_a_draw_depends_on_seed_stage_and_step_alone():
    assert draw() == draw()
    assert len({tuple(draw(step=step)) for step in range(50)}) > 45
    assert draw(seed=2) != draw() != draw(stage="t")


def test_rows_are_drawn_without_repeats_and_each_as_often():
    counts = np.zeros(20)
    for step in range(2000):
        found = draw(step=step)
        assert len(set(found)) == 6
        counts[found] += 1
    assert abs(counts / 2000 - 0.3).max() < 0.05


def test_a_small_batch_is_taken_whole():
    assert sorted(draw(max_context=64)) == list(range(20))
    assert draw(max_context=None) == list(range(20))
