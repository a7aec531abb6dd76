"""Any bytes make a log, in any form, with holes, cut anywhere: see `log_cases`.

`make fuzz` searches further, guided by coverage; what it finds belongs into FOUND.
"""

from __future__ import annotations

import random

import log_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FOUND = [
    b"\x04}x!\x96\x05\xdc\xe9p+\xc3\x9f",  # which form decides was a matter of the block size
]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes(data: bytes) -> None:
    log_cases.check(data)


@pytest.mark.parametrize("seed", range(6))
def test_the_same_bytes_every_time(seed: int) -> None:
    """As many of each kind of log, whatever hypothesis tries."""
    source = random.Random(seed)
    for _number in range(60):
        log_cases.check(bytes([seed]) + source.randbytes(source.randrange(400)))


@pytest.mark.parametrize("form", sorted(log_cases.FORMS))
def test_every_form_can_be_complete_and_can_lack_its_beginning(form: str) -> None:
    chosen = sorted(log_cases.FORMS).index(form)
    log_cases.check(bytes([1, 5, 1, 2, 3, 4, 5, chosen]))
    log_cases.check(bytes([2, chosen, 5, 1, 2, 3, 4, 5, 40]))


@pytest.mark.parametrize("data", FOUND)
def test_what_was_found_before(data: bytes) -> None:
    log_cases.check(data)
