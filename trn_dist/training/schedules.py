"""Learning-rate schedules: plain functions from the number of steps already taken to a learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable

from trn_dist.errors import ConfigError

Schedule = Callable[[int], float]


def linear_warmup_linear_decay(peak: float, warmup_steps: int, total_steps: int) -> Schedule:
    """Rises from 0 to `peak` over the warm-up, then falls to 0 at `total_steps`, both in straight lines.

    Step 0 has a learning rate of 0, as in the published BERT recipe.

    Args:
        peak: learning rate at the end of the warm-up.
        warmup_steps: length of the warm-up in steps; 0 starts at `peak`.
        total_steps: step at which the learning rate reaches 0; the horizon of the schedule, not of one run.

    Raises:
        ConfigError: the warm-up is negative or does not end before the horizon.
    """
    _check(warmup_steps, total_steps)

    def learning_rate(step: int) -> float:
        if step < warmup_steps:
            return peak * step / warmup_steps
        return peak * max(0.0, (total_steps - step) / (total_steps - warmup_steps))

    return learning_rate


def linear_warmup_polynomial_decay(
    peak: float, warmup_steps: int, total_steps: int, *, power: float = 0.5, floor: float = 0.0
) -> Schedule:
    """Rises from 0 to `peak` in a straight line, then falls as peak * (1 - progress) ** power, never below `floor`.

    Args:
        peak: learning rate at the end of the warm-up.
        warmup_steps: length of the warm-up in steps.
        total_steps: step at which progress reaches 1.
        power: exponent; 0.5 is the published LAMB recipe's.
        floor: lower bound after the warm-up.

    Raises:
        ConfigError: the warm-up is negative or does not end before the horizon.
    """
    _check(warmup_steps, total_steps)

    def learning_rate(step: int) -> float:
        if step < warmup_steps:
            return peak * step / warmup_steps
        progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return max(floor, peak * math.pow(1.0 - progress, power))

    return learning_rate


def _check(warmup_steps: int, total_steps: int) -> None:
    if not 0 <= warmup_steps < total_steps:
        raise ConfigError(
            f"the warm-up ({warmup_steps} steps) must end before the schedule does ({total_steps} steps): "
            "lower warmup_steps or raise max_steps"
        )
