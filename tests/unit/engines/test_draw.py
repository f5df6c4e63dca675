"""Drawing: reference numbers of the hash, supports worked out by hand, frequencies, logprobs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hotloop.engines.torch.draw import (
    Shape,
    compute_distribution,
    compute_keys,
    compute_uniforms,
    draw,
    draw_raw_one,
    draw_raw_row,
    mix64,
)
from hotloop.engines.torch.heads import find_best

GOLDEN = 0x9E3779B97F4A7C15


def keys_of(seed: int, count: int) -> np.ndarray:
    return compute_keys(np.full(count, seed, dtype=np.uint64), np.arange(count))


def logits_of(probabilities: list[list[float]]) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


def test_the_hash_gives_the_published_first_outputs_of_splitmix64() -> None:
    states = np.array([GOLDEN, (2 * GOLDEN) % 2**64, (3 * GOLDEN) % 2**64], dtype=np.uint64)
    assert mix64(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_uniform_numbers_depend_on_seed_index_and_position_only() -> None:
    keys = keys_of(7, 4)
    one_by_one = [compute_uniforms(keys[i : i + 1], np.array([9]))[0] for i in range(4)]
    assert compute_uniforms(keys, np.full(4, 9)).tolist() == one_by_one
    assert (
        len(
            {
                *one_by_one,
                *compute_uniforms(keys, np.full(4, 10)),
                *compute_uniforms(keys_of(8, 4), np.full(4, 9)),
            }
        )
        == 12
    )


def test_uniform_numbers_are_inside_the_interval_and_even() -> None:
    values = compute_uniforms(keys_of(0, 200).repeat(500), np.tile(np.arange(500), 200))
    assert values.min() > 0 and values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    # 19 degrees of freedom: above 43.8 with probability 0.001
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01


PROBS = [[0.1, 0.4, 0.05, 0.25, 0.2]]


@pytest.mark.parametrize(
    ("shape", "support"),
    [
        (Shape(top_k=1), [1]),
        (Shape(top_k=3), [1, 3, 4]),
        (Shape(top_p=0.39), [1]),
        (Shape(top_p=0.41), [1, 3]),
        (Shape(top_p=0.84), [1, 3, 4]),
        (Shape(top_p=0.999), [0, 1, 2, 3, 4]),
        (Shape(min_p=0.49), [1, 3, 4]),
        (Shape(min_p=0.6), [1, 3]),
        # after top-k 3 the mass is .85: .4/.85 = .47, so top-p .7 needs the second (.76) and no third
        (Shape(top_k=3, top_p=0.7), [1, 3]),
        # without top-k, .4 + .25 = .65 is short of .7
        (Shape(top_p=0.7), [1, 3, 4]),
        # temperature 0.5 squares the odds: .16 .0625 .04 .01 .0025 of .275; .58 + .23 = .81
        (Shape(temperature=0.5, top_p=0.8), [1, 3]),
        (Shape(bias=((2, math.log(100.0)),), top_k=1), [2]),
    ],
)
def test_supports_are_those_worked_out_by_hand(shape: Shape, support: list[int]) -> None:
    found = compute_distribution(logits_of(PROBS), shape)
    assert torch.nonzero(found.kept[0])[:, 0].tolist() == support
    weights = np.array(PROBS[0])
    for token, value in shape.bias:
        weights[token] *= math.exp(value)
    weights = weights ** (1 / shape.temperature)
    wanted = weights[support] / weights[support].sum()
    np.testing.assert_allclose(found.sampling[0, support].exp().numpy(), wanted, rtol=1e-5)
    np.testing.assert_allclose(found.raw[0].exp().numpy(), PROBS[0], rtol=1e-5)


def test_a_tie_at_the_cut_keeps_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0]])
    assert compute_distribution(logits, Shape(top_k=2)).kept.tolist() == [[True, True, False, False]]


def test_a_tiny_temperature_is_almost_greedy_and_a_number() -> None:
    found = compute_distribution(logits_of(PROBS), Shape(temperature=1e-40, top_p=0.9))
    assert found.sampling[0].exp().tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]


def test_greedy_takes_the_best_and_its_sampling_logprob_is_zero() -> None:
    logits = logits_of([PROBS[0], [0.2, 0.2, 0.2, 0.2, 0.2]])
    drawn = draw(compute_distribution(logits, Shape(temperature=0.0)), np.array([0, 1]), np.array([0.9, 0.9]))
    assert drawn.tokens.tolist() == [1, 0]
    assert drawn.sampling_logprobs.tolist() == [0.0, 0.0]
    np.testing.assert_allclose(drawn.logprobs, np.log([0.4, 0.2]), rtol=1e-5)


def test_a_token_is_the_first_whose_cumulative_probability_passes_u() -> None:
    found = compute_distribution(logits_of(PROBS), Shape())
    uniforms = np.array([0.0999, 0.1001, 0.4999, 0.5001, 0.5501, 0.9999999])
    assert draw(found, np.zeros(6, dtype=np.int64), uniforms).tokens.tolist() == [0, 1, 1, 2, 3, 4]


def test_several_completions_of_one_row_draw_as_they_would_alone() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    rows = np.array([2, 0, 2, 1, 0, 2, 2])
    uniforms = np.random.default_rng(0).random(7)
    found = compute_distribution(logits, Shape(temperature=0.7))
    together = draw(found, rows, uniforms)
    for at, row in enumerate(rows):
        alone = draw(
            compute_distribution(logits[row : row + 1], Shape(temperature=0.7)),
            np.zeros(1, np.int64),
            uniforms[at : at + 1],
        )
        assert alone.tokens[0] == together.tokens[at]
        assert alone.sampling_logprobs[0] == pytest.approx(together.sampling_logprobs[at], abs=1e-6)
    assert together.sampling_logprobs.tolist() == found.sampling[rows, together.tokens].tolist()


def test_removed_tokens_are_never_drawn_even_at_the_edges() -> None:
    found = compute_distribution(logits_of([[0.3, 0.3, 0.2, 0.2]]), Shape(top_k=2))
    edges = np.array([2.0**-49, 1 - 2.0**-49, 0.5, 0.4999999, 0.5000001])
    assert set(draw(found, np.zeros(5, dtype=np.int64), edges).tokens.tolist()) <= {0, 1}
    last_only = compute_distribution(torch.tensor([[-1e30, -1e30, 0.0, -1e30]]), Shape())
    assert set(draw(last_only, np.zeros(5, dtype=np.int64), edges).tokens.tolist()) == {2}


def test_frequencies_follow_the_probabilities() -> None:
    found = compute_distribution(logits_of(PROBS), Shape())
    count = 20_000
    uniforms = compute_uniforms(keys_of(3, count), np.zeros(count, dtype=np.int64))
    tokens = draw(found, np.zeros(count, dtype=np.int64), uniforms).tokens
    wanted = np.array(PROBS[0]) * count
    # 4 degrees of freedom: above 18.5 with probability 0.001
    assert ((np.bincount(tokens, minlength=5) - wanted) ** 2 / wanted).sum() < 18.5


def test_best_tokens_are_sorted_ties_by_id_and_removed_ones_left_out() -> None:
    logprobs = torch.tensor([-2.0, -1.0, -1.0, -math.inf, -1.0])
    assert find_best(logprobs, 2) == ([1, 2], [-1.0, -1.0])
    assert find_best(logprobs, 9)[0] == [1, 2, 4, 0]


def test_one_number_draws_from_a_raw_row_what_many_do() -> None:
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(0, 3, size=40).astype(np.float32))
    uniforms = rng.random(200)
    many = draw_raw_row(logits, uniforms)
    for at, uniform in enumerate(uniforms.tolist()):
        assert draw_raw_one(logits.numpy(), uniform) == (many.tokens[at], many.logprobs[at])
