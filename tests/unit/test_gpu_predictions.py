"""What a GPU should measure: counts of BERT base, what bounds a step, what a local run reaches."""

import numpy as np
import pytest
from benchmarks.gpu import local_run, predictions
from benchmarks.gpu.predictions import BETWEEN_STEPS_SECONDS, LAUNCH_SECONDS, cut

LAYERS, HIDDEN, INNER = 12, 768, 3072
MEASURED_PAIRS, MEASURED_TOKENS = 1_337, 267_244
"""A second, on an H200 on 2026-11-28: 256 pairs a step, passes of 16,384 tokens."""


@pytest.fixture(scope="module")
def bert():
    return predictions.Model(local_run.bert_base(), "H100")


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
    # Six products, two norms, attention, gelu, two additions, two of the mask.
    assert forward.kernels == LAYERS * 14 + 7
    # Twelve products, six sums for biases, two norms, attention, gelu, and four additions of
    # gradients; those of weights are kept as they come.
    assert both.kernels - forward.kernels == LAYERS * 26 + 9


def test_a_step_of_that_h200_takes_what_it_took_with_its_tokenising():
    bert = predictions.Model(local_run.bert_base(), "H200")
    a_pair = MEASURED_TOKENS / MEASURED_PAIRS
    lengths = [round(a_pair / 2)] * 512
    found = bert.training_step(cut(lengths, 16_384))
    assert found.passes == 4
    assert found.bound == "launches"
    # Texts were tokenised within the step, which is no part of the prediction.
    assert 0.8 < found.seconds / (256 / MEASURED_PAIRS) < 1.0
    assert found.gigabytes == pytest.approx(17.3, rel=0.1)


def test_small_passes_are_bound_by_launches_and_one_by_the_gpu(bert, lengths):
    steps = {n: bert.training_step(cut(lengths, n)) for n in (8_192, 16_384, 65_536)}
    assert [steps[n].bound for n in steps] == ["launches", "launches", "GPU"]
    kernels = bert.costs(gradient=True).of([128]).kernels
    assert steps[8_192].seconds == pytest.approx(6 * kernels * LAUNCH_SECONDS)
    assert steps[8_192].share < 0.15
    assert steps[65_536].share > 0.5


def test_a_local_run_of_one_pass_and_four_readers_reaches_half_of_what_products_reach(bert):
    rate = predictions.READERS * predictions.READER_TOKENS
    before = local_run.local_run(bert, 256, 8_192, readers=predictions.THREAD_TOKENS)
    assert before.bound == "tokenising"
    assert before.share < 0.1
    found = local_run.local_run(bert, 512, 131_072, readers=rate)
    assert (found.bound, found.passes) == ("GPU", 1)
    assert found.share >= 0.49
    compiled = local_run.local_run(bert, 512, 131_072, readers=rate, compiled=True)
    assert compiled.share >= 0.51
    # Seconds between steps count in full, and the optimiser moves what it moves.
    alone = bert.training_step(
        cut([n for column in predictions.lengths_of_pairs(512) for n in column], 131_072),
        optimiser_bytes=0,
    )
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


def test_layers_of_a_large_model_are_kept_as_memory_allows(bert):
    assert bert.size.kept_layers("H100", 50_000, 50_000) == LAYERS
    size = predictions.Size(7_000_000_000, 40_000_000, 8.2e6, 0.28e6, 256e3, 32)
    kept = [size.kept_layers("H200", tokens, 8_192) for tokens in (8_000, 16_000, 32_000)]
    assert kept[0] == 32
    assert kept == sorted(kept, reverse=True)
    assert 0 < kept[1] < 32
    left = predictions.GPU_BYTES["H200"] - predictions.SPARE_BYTES - 14e9 - 6 * 40e6
    a_layer = (8.2e6 - 0.28e6) / 32
    taken = 16_000 * (0.28e6 + kept[1] * a_layer) + 8_192 * 256e3
    assert 0 <= 0.8 * left - taken < 16_000 * a_layer


def test_counts_are_left_for_later_processes(tmp_path, monkeypatch):
    first = predictions.Model(local_run.bert_base(), "H100", tmp_path)
    found = first.costs(gradient=False).of([100]).vector()
    monkeypatch.setattr(predictions, "PassCosts", None)
    again = predictions.Model(local_run.bert_base(), "H100", tmp_path)
    np.testing.assert_array_equal(again.costs(gradient=False).of([100]).vector(), found)
    with pytest.raises(TypeError):
        again.costs(gradient=False, padded=True)


def test_a_search_waits_for_the_documents_until_queries_are_many():
    machine = predictions.MACHINES["H100"]

    def seconds(queries):
        return predictions.search_seconds(queries, 500_000, 1024, 2, machine)

    assert seconds(64) == seconds(128) == 500_000 * 1024 * 2 / predictions.COPY_BYTES
    assert seconds(10**6) == pytest.approx(10 * seconds(10**5))


def test_the_table_names_its_assumptions(bert, capsys, monkeypatch):
    monkeypatch.setattr(local_run, "Model", lambda settings, gpu: bert)
    local_run.main(["--pairs", "64"])
    printed = capsys.readouterr().out
    for assumed in ("700 TFLOP/s", "2.7 TB/s", "90 µs", "250,000", "989 are on the data sheet"):
        assert assumed in printed
    assert "496 kernels a pass" in printed
    rows = [line for line in printed.splitlines() if line.startswith("| local run")]
    assert len(rows) == 5
