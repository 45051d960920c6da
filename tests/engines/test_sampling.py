"""Random numbers that belong to (key, position), and drawing tokens with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from flowgraph.engines.sampling import Sampler, uniform


def sample(
    logits_SV: torch.Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    return Sampler(*logits_SV.shape)(logits_SV, temperatures, uniforms)


def test_uniform_never_changes() -> None:
    assert uniform(0, 0) == 0.6078401324846523
    assert uniform(2**64 - 1, 7) == 0.7549802674666686


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32))
def test_uniform_is_a_53_bit_number_below_one(key: int, position: int) -> None:
    number = uniform(key, position)
    assert 0 <= number < 1
    assert (number * 2**53).is_integer()
    assert number == uniform(key, position)


def test_uniform_spreads_over_positions_and_keys() -> None:
    for numbers in ([uniform(5, i) for i in range(4000)], [uniform(i, 5) for i in range(4000)]):
        assert abs(sum(numbers) / 4000 - 0.5) < 0.02
        assert len(set(numbers)) == 4000


def test_the_logprob_is_that_of_the_scaled_distribution() -> None:
    logits_SV = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)) * 4
    temperatures = [0.5, 1.0, 2.0, 0.7, 1.3, 1e-3]
    tokens, logprobs = sample(logits_SV, temperatures, [0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
    for row, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        expected = torch.log_softmax(logits_SV[row] / temperatures[row], dim=0)[token]
        torch.testing.assert_close(torch.tensor(logprob), expected, atol=1e-4, rtol=1e-5)


def test_temperature_zero_takes_the_largest_and_its_unscaled_logprob() -> None:
    logits_SV = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    tokens, logprobs = sample(logits_SV, [0.0, 1.0], [0.999, 0.0])
    assert tokens == [1, 0]
    torch.testing.assert_close(logprobs[0], torch.log_softmax(logits_SV[0], 0)[1].item())


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125])
    draws = 4000
    tokens, _ = sample(
        probabilities.log().expand(draws, 5), [1.0] * draws, [uniform(11, i) for i in range(draws)]
    )
    frequencies = torch.bincount(torch.tensor(tokens), minlength=5) / draws
    torch.testing.assert_close(frequencies, probabilities, atol=0.03, rtol=0)
    assert frequencies[1] == 0


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 2**32))
def test_a_token_of_probability_zero_is_never_drawn(draw: float, seed: int) -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * 40
    logits[::3] = -torch.inf
    logits[-5:] = -torch.inf
    edges = [0.0, draw, 1 - 2**-53]
    tokens, logprobs = sample(logits.expand(3, 64), [1.0] * 3, edges)
    assert all(logits[token] > -torch.inf for token in tokens)
    assert all(logprob > -120 for logprob in logprobs)


def test_a_vanishing_temperature_is_greedy() -> None:
    tokens, logprobs = sample(torch.tensor([[1.0, 3.0, 2.0]]), [1e-300], [0.5])
    assert (tokens, logprobs) == ([1], [0.0])


def test_rows_that_are_not_finite_get_nan() -> None:
    bad = torch.tensor([[0.0, torch.nan], [0.0, torch.inf], [1.0, 2.0]])
    _, logprobs = sample(bad, [1.0] * 3, [0.5] * 3)
    assert [logprob == logprob for logprob in logprobs] == [False, False, True]
