"""Int8 and bits of unit vectors: by hand, against sentence-transformers, the same in torch."""

import numpy as np
import pytest
import torch
from sentence_transformers.util.quantization import quantize_embeddings

from rayembed.losses.straight_through import straight_through
from rayembed.machine import quantisation as q


def unit(count, width, seed=0):
    drawn = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def test_codes_by_hand():
    # Four dimensions: 8/2 exceeds the largest component of a unit vector, so the range is 1.
    vectors = np.array([[0.5, -0.5, 0.5, -0.5], [1.0, 0.0, -0.0, 0.0]], np.float32)
    # 127 times 0.5 is 63.5, of which the nearest even integer is 64.
    assert q.to_int8(vectors).tolist() == [[64, -64, 64, -64], [127, 0, 0, 0]]
    assert q.to_bits(vectors).tolist() == [[0b10100000], [0b10000000]]
    assert q.from_bits(q.to_bits(vectors), 4).tolist() == [
        [0.5, -0.5, 0.5, -0.5],
        [0.5, -0.5, -0.5, -0.5],
    ]
    # 256 dimensions: the range is 8/16, a step 1/254; what is above the range is cut.
    wide = np.zeros((1, 256), np.float32)
    wide[0, :4] = 0.25, -10 / 254, 0.6, -0.7
    assert q.to_int8(wide)[0, :5].tolist() == [64, -10, 127, -127, 0]


@pytest.mark.parametrize("width", [5, 64, 256, 1000])
def test_codes_are_those_of_sentence_transformers(width):
    vectors = unit(200, width)
    for name, shift in (("ubinary", 0), ("binary", 128)):
        theirs = quantize_embeddings(vectors, name)
        assert np.array_equal(theirs.astype(int) + shift, q.to_bits(vectors))
    # Theirs round down within given ranges: half a step lower, they round to the nearest.
    step = q.int8_step(width)
    ranges = np.array([[-128.5 * step] * width, [126.5 * step] * width])
    theirs = quantize_embeddings(vectors, "int8", ranges=ranges)
    apart = theirs.astype(int) - q.to_int8(vectors)
    assert np.abs(apart).max() <= 1
    assert (apart != 0).mean() < 1e-4  # their sums round otherwise beside a half


def test_products_of_codes_are_cosines():
    vectors = unit(300, 128)
    exact = vectors @ vectors.T
    codes = q.to_int8(vectors).astype(np.int64)
    found = codes @ codes.T * q.int8_step(128) ** 2
    assert np.abs(found - exact).max() < 0.02
    # In float32 the sums of products of codes are exact integers: 2^24 is far.
    in_float = codes.astype(np.float32) @ codes.astype(np.float32).T
    assert np.array_equal(in_float.astype(np.int64), codes @ codes.T)
    bits = q.to_bits(vectors)
    different = np.bitwise_count(bits[:, None] ^ bits[None]).sum(-1)
    signs = q.quantised(vectors, "binary")
    np.testing.assert_allclose(signs @ signs.T, 1 - 2 * different / 128, atol=1e-6)
    assert q.quantised(vectors, "float32") is vectors


@pytest.mark.parametrize("precision", ["float32", "int8", "binary"])
@pytest.mark.parametrize("width", [3, 30, 384])
def test_training_scores_the_very_numbers_that_are_searched(precision, width):
    vectors = unit(100, width)
    vectors[0, 0] = 0.0
    found = straight_through(torch.from_numpy(vectors), precision).numpy()
    assert found.dtype == np.float32
    assert np.array_equal(found, q.quantised(vectors, precision))
