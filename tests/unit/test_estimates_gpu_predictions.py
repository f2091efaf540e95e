"""What a GPU should measure: counts of BERT base, what bounds a step, what a local run reaches."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.gpu import local_run, predictions
from benchmarks.gpu.predictions import BETWEEN_STEPS_SECONDS, MACHINES, cut

LAYERS, HIDDEN, INNER = 12, 768, 3072
MEASURED_PAIRS, MEASURED_TOKENS = 1_337, 267_244
"""A second, on an H200 on 2026-11-28: 256 pairs a step, passes of 16,384 tokens."""


@pytest.fixture(scope="module")
def bert():
    return predictions.Model(local_run.bert_base(), MACHINES["H100"])


@pytest.fixture(scope="module")
def slow():
    machine = replace(MACHINES["H200"], kernel_seconds=predictions.SLOW_HOST)
    return predictions.Model(local_run.bert_base(), machine)


@pytest.fixture(scope="module")
def lengths():
    return [n for column in predictions.lengths_of_pairs(256) for n in column]


def test_products_of_a_token_are_those_of_the_published_shape(bert):
    weights = LAYERS * (4 * HIDDEN**2 + 2 * HIDDEN * INNER)
    one, two = (bert.costs(gradient=True).of([n]) for n in (256, 512))
    a_token = (two.product_flops - one.product_flops) / 256
    assert a_token == pytest.approx(3 * 2 * weights, rel=1e-3)
    # What counts has positions, norms and the pooler in it, a per cent more.
    assert 3 * bert.forward_flops() == pytest.approx(a_token, rel=0.015)


def test_kernels_of_a_pass_are_those_of_twelve_layers(bert):
    forward, both = (bert.costs(gradient=gradient).of([128]) for gradient in (False, True))
    # Six products, two norms, attention, gelu, two additions, a cast.
    assert forward.kernels == LAYERS * 13 + 7
    # Twelve products, six sums for biases, two norms, attention, gelu, and four additions of
    # gradients; those of weights are kept as they come.
    assert both.kernels - forward.kernels == LAYERS * 26 + 9


def test_a_step_of_that_h200_takes_what_it_took_with_its_tokenising(slow):
    a_pair = MEASURED_TOKENS / MEASURED_PAIRS
    lengths = [round(a_pair / 2)] * 512
    found = slow.training_step(cut(lengths, 16_384))
    assert found.passes == 4
    assert found.bound == "launches"
    # At worst: texts were tokenised within the step, which is no part of the prediction.
    assert 0.8 < found.seconds / (256 / MEASURED_PAIRS) < 1.0
    assert found.gigabytes == pytest.approx(17.3, rel=0.1)


def test_small_passes_are_bound_by_launches_and_one_by_the_gpu(bert, lengths):
    steps = {n: bert.training_step(cut(lengths, n)) for n in (8_192, 16_384, 65_536)}
    assert [steps[n].bound for n in steps] == ["launches", "launches", "GPU"]
    first, both = (bert.costs(gradient=x).of([128]).kernels for x in (False, True))
    forward, backward = bert.machine.kernel_seconds
    a_pass = first * forward + (both - first) * backward
    assert steps[8_192].seconds == pytest.approx(6 * a_pass)
    assert steps[8_192].share < 0.25
    assert steps[65_536].share > 0.5


def test_a_local_run_with_four_readers_reaches_half_of_what_products_reach(bert, slow):
    rate = predictions.READERS * predictions.READER_TOKENS
    before = local_run.local_run(bert, 256, 8_192, readers=predictions.THREAD_TOKENS)
    assert before.bound == "tokenising"
    assert before.share < 0.1
    assert (local_run.budget_of(bert), local_run.budget_of(slow)) == (57_344, 98_304)
    found = local_run.local_run(bert, 512, readers=rate)
    assert (found.bound, found.passes) == ("GPU", 2)
    assert found.share >= 0.49
    assert local_run.local_run(bert, 512, readers=rate, compiled=True).share >= 0.51
    # Passes of 98,304 tokens hide a host that is slow; those of 32,768 do not.
    assert local_run.local_run(slow, 512, readers=rate).share >= 0.5
    assert local_run.local_run(slow, 512, 32_768, readers=rate).share < 0.4
    # Seconds between steps count in full, and the optimiser moves what it moves.
    lengths = [n for column in predictions.lengths_of_pairs(512) for n in column]
    alone = bert.training_step(cut(lengths, 57_344), optimiser_bytes=0)
    moved = bert.size.trained * predictions.JOB_OPTIMISER_BYTES / bert.machine.memory
    assert found.seconds == pytest.approx(alone.seconds + moved + BETWEEN_STEPS_SECONDS)


def test_the_other_side_pays_for_padding_where_it_pads(bert):
    columns = predictions.lengths_of_pairs(256)
    tokens = sum(map(sum, columns))
    padded, unpadded = (
        bert.training_step(predictions.of_columns(columns, padded=pads), tokens=tokens, padded=pads)
        for pads in (True, False)
    )
    assert sum(map(sum, predictions.of_columns(columns, padded=True))) > 2 * tokens
    assert padded.tokens == unpadded.tokens == tokens
    assert padded.seconds > 2 * unpadded.seconds
    again = bert.training_step([columns[0]], recomputed=True)
    assert again.seconds > 1.1 * bert.training_step([columns[0]]).seconds
    assert again.gigabytes < bert.training_step([columns[0]]).gigabytes


def test_steps_of_the_own_sides_are_the_rooflines_with_their_memory(tmp_path, monkeypatch):
    found = predictions.of_training("bert", "auto", "H200", 65_536, 784e12, tmp_path)
    step = predictions.roofline.predicted("bert", 1, "auto", MACHINES["H200"], 65_536)
    assert found.seconds == step.seconds
    assert found.share == pytest.approx(step.share * 989 / 784)
    assert found.tokens_per_second == pytest.approx(step.tokens_per_second, rel=1e-3)
    # 110M parameters: weights, gradients and states in bfloat16, and 0.3 MB a token.
    assert found.gigabytes == pytest.approx((109.5e6 * 8 + found.tokens * 0.297e6) / 1e9, rel=0.02)
    monkeypatch.setattr(predictions, "roofline", None)
    again = predictions.of_training("bert", "auto", "H200", 65_536, 392e12, tmp_path)
    assert again.share == pytest.approx(2 * found.share)


def test_counts_are_left_for_later_processes(tmp_path, monkeypatch):
    first = predictions.Model(local_run.bert_base(), MACHINES["H100"], tmp_path)
    found = first.costs(gradient=False).of([100]).vector()
    monkeypatch.setattr(predictions, "PassCosts", None)
    again = predictions.Model(local_run.bert_base(), MACHINES["H100"], tmp_path)
    np.testing.assert_array_equal(again.costs(gradient=False).of([100]).vector(), found)
    with pytest.raises(TypeError):
        again.costs(gradient=False, padded=True)


def test_a_search_waits_for_the_documents_until_queries_are_many():
    machine = MACHINES["H100"]

    def seconds(queries):
        return predictions.search_seconds(queries, 500_000, 1024, 2, machine)

    assert seconds(64) == seconds(128) == 500_000 * 1024 * 2 / predictions.COPY_BYTES
    assert seconds(10**6) == pytest.approx(10 * seconds(10**5))


def test_the_table_names_its_assumptions(bert, capsys, monkeypatch):
    monkeypatch.setattr(local_run, "Model", lambda settings, machine: bert)
    local_run.main(["--pairs", "64"])
    printed = capsys.readouterr().out
    for assumed in (
        "700 TFLOP/s",
        "2.7 TB/s",
        "80 and 40 µs",
        "250,000",
        "989 are on the data sheet",
    ):
        assert assumed in printed
    assert "484 kernels a pass" in printed
    rows = [line for line in printed.splitlines() if line.startswith("| local run")]
    assert len(rows) == 5
