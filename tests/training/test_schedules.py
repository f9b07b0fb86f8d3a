import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trn_dist.errors import ConfigError
from trn_dist.training import linear_warmup_linear_decay, linear_warmup_polynomial_decay


def test_linear_schedule_is_transformers():
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=4e-4)
    theirs = get_linear_schedule_with_warmup(optimizer, 20, 100)
    ours = linear_warmup_linear_decay(4e-4, 20, 100)
    for step in range(110):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_the_published_recipe():
    rate = linear_warmup_linear_decay(4e-4, 2000, 28125)
    assert rate(0) == 0.0
    assert rate(500) == pytest.approx(1e-4)
    assert rate(2000) == 4e-4
    assert rate(28125) == 0.0


def test_polynomial_decay_by_hand():
    rate = linear_warmup_polynomial_decay(1.0, 10, 110, power=0.5, floor=0.1)
    assert rate(5) == 0.5
    assert rate(10) == 1.0
    assert rate(85) == pytest.approx(0.5)  # a quarter is left, its square root is a half
    assert rate(110) == 0.1
    assert rate(200) == 0.1


@given(warmup=st.integers(0, 50), rest=st.integers(1, 50), step=st.integers(0, 200))
def test_never_negative_nor_above_the_peak(warmup, rest, step):
    for rate in (
        linear_warmup_linear_decay(0.3, warmup, warmup + rest),
        linear_warmup_polynomial_decay(0.3, warmup, warmup + rest),
    ):
        assert 0.0 <= rate(step) <= 0.3


@pytest.mark.parametrize(("warmup", "total"), [(10, 10), (11, 10), (-1, 10)])
def test_a_warmup_that_does_not_end_is_refused(warmup, total):
    with pytest.raises(ConfigError, match=r"warm-up .* must end before the schedule does"):
        linear_warmup_linear_decay(1.0, warmup, total)
