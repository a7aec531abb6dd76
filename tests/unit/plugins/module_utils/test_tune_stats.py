"""Student's t, ratios of arms, and lines between measured concurrencies."""

from __future__ import annotations

import math

import pytest
from ansible_collections.gpuhost.inference.plugins.module_utils._tune_stats import (
    between,
    compare,
    spread,
    t_quantile,
)


# Printed tables of Student's distribution, two-sided.
@pytest.mark.parametrize(
    ("confidence", "freedom", "t"),
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 3, 3.182),
        (0.95, 4, 2.776),
        (0.95, 6, 2.447),
        (0.95, 7, 2.365),
        (0.95, 30, 2.042),
        (0.95, 120, 1.980),
        (0.975, 2, 6.205),
        (0.99, 5, 4.032),
        (0.9, 10, 1.812),
    ],
)
def test_quantiles(confidence: float, freedom: int, t: float) -> None:
    assert t_quantile(confidence, freedom) == pytest.approx(t, abs=6e-4)


def test_two_starts_a_side() -> None:
    """By hand: means 1 and 2, variance 0.02 in both, error sqrt(0.02), t of 2 degrees 4.3027."""
    found = compare([0.9, 1.1], [1.9, 2.1], 0.95)
    reach = 4.30265 * math.sqrt(0.02)
    assert found.value == pytest.approx(math.e)
    assert found.low == pytest.approx(math.exp(1 - reach), rel=1e-4)
    assert found.high == pytest.approx(math.exp(1 + reach), rel=1e-4)
    assert found.starts == (2, 2)


def test_two_and_three_starts() -> None:
    """By hand: squares 0.02 and 0.02, 3 degrees, t 3.1824."""
    found = compare([0.9, 1.1], [1.9, 2.0, 2.1], 0.95)
    reach = 3.18245 * math.sqrt(0.04 / 3 * (1 / 2 + 1 / 3))
    assert found.high == pytest.approx(math.exp(1 + reach), rel=1e-4)


@pytest.mark.parametrize(
    ("first", "second", "fewest", "known", "interval"),
    [
        ([], [1.0, 2.0], 2, False, False),
        ([1.0], [1.0], 2, True, False),
        ([1.0], [1.0], 1, True, False),
        ([1.0], [1.0, 1.1, 1.2], 2, True, False),
        ([1.0], [1.0, 1.1], 1, True, True),
        ([1.0, 9.0], [1.0, 900.0], 2, True, True),
    ],
)
def test_too_few_starts(
    first: list[float], second: list[float], fewest: int, known: bool, interval: bool
) -> None:
    found = compare(first, second, 0.95, fewest)
    assert (found.value is not None) is known
    assert (found.low is not None) is interval
    assert (found.high is not None) is interval


@pytest.mark.parametrize(
    ("concurrency", "weights"),
    [
        (8, {8: 1.0}),
        (16, {8: 0.5, 32: 0.5}),
        (2, {1: 2 / 3, 8: 1 / 3}),
        (129, None),
        (200, None),
    ],
)
def test_between(concurrency: int, weights: dict[int, float] | None) -> None:
    assert between(concurrency, [1, 8, 32, 128]) == (
        None if weights is None else pytest.approx(weights)
    )


def test_nothing_is_said_outside_of_what_was_measured() -> None:
    assert between(4, [8, 32]) is None
    assert between(64, [8, 32]) is None
    assert between(64, []) is None
    assert spread({1: 0.5, 64: 0.5}, [8, 32]) == ({}, 0.0)


def test_spread() -> None:
    weights, covered = spread({8: 0.5, 16: 0.3, 300: 0.2}, [8, 32, 128])
    assert covered == pytest.approx(0.8)
    assert weights == pytest.approx({8: 0.65 / 0.8, 32: 0.15 / 0.8})
