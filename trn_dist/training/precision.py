"""Numeric precision of a run, as one choice instead of five flags that can cancel each other.

| name | weights | optimizer state | rounding of the weights | forward |
|---|---|---|---|---|
| `fp32` | fp32 | fp32 | nearest | fp32 |
| `bf16` | bf16 | fp32 | stochastic | bf16 |
| `bf16-master` | bf16 | fp32, with an fp32 copy of the weights | nearest | bf16 |
| `autocast` | fp32 | fp32 | nearest | bf16 where autocast allows it |
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trn_dist.errors import ConfigError


@dataclass(frozen=True)
class Precision:
    """See the module's table. Made by `Precision.named`.

    Attributes:
        name: one of `fp32`, `bf16`, `bf16-master`, `autocast`.
        weights: dtype of the model's parameters.
        master_weights: whether the optimizer keeps an fp32 copy of the weights.
        stochastic_rounding: whether fp32 updates are rounded to the weights' dtype at random in proportion to the
            remainder, so that updates below half a unit in the last place are not lost.
        autocast_dtype: dtype of the forward pass under autocast, or None without autocast.
    """

    name: str
    weights: torch.dtype
    master_weights: bool = False
    stochastic_rounding: bool = False
    autocast_dtype: torch.dtype | None = None

    @classmethod
    def named(cls, name: str) -> Precision:
        """Returns the precision of that name.

        Raises:
            ConfigError: there is none of that name.
        """
        if name not in _PRECISIONS:
            raise ConfigError(f"unknown precision {name!r}: choose one of {', '.join(_PRECISIONS)}")
        return _PRECISIONS[name]

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Returns the context in which the forward pass runs."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype)

    def neuron_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables to set before the Neuron runtime starts, given those that are set already.

        Stochastic rounding is the NeuronCore's own (NEURON_RT_STOCHASTIC_ROUNDING_EN, Neuron runtime configuration
        guide); for `autocast` the compiler's own casts are turned off, or the two would multiply.

        Raises:
            ConfigError: the environment contradicts this precision.
        """
        for removed in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
            if environment.get(removed, "0") != "0":
                raise ConfigError(
                    f"{removed} was removed from torch_xla and changes nothing today: unset it and choose the "
                    "precision 'bf16' instead"
                )
        wanted = "1" if self.stochastic_rounding else "0"
        found = environment.get("NEURON_RT_STOCHASTIC_ROUNDING_EN", wanted)
        if found != wanted:
            raise ConfigError(
                f"NEURON_RT_STOCHASTIC_ROUNDING_EN={found} contradicts the precision '{self.name}', which needs "
                f"{wanted}: unset it, or choose another precision"
            )
        changes = {"NEURON_RT_STOCHASTIC_ROUNDING_EN": wanted}
        flags = environment.get("NEURON_CC_FLAGS", "")
        if self.autocast_dtype is not None and "--auto-cast" not in flags:
            changes["NEURON_CC_FLAGS"] = f"{flags} --auto-cast=none".strip()
        return changes


_PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", torch.float32),
        Precision("bf16", torch.bfloat16, stochastic_rounding=True),
        Precision("bf16-master", torch.bfloat16, master_weights=True),
        Precision("autocast", torch.float32, autocast_dtype=torch.bfloat16),
    )
}


def round_stochastically(values: torch.Tensor) -> torch.Tensor:
    """Rounds fp32 to bf16 at random, up or down in proportion to the remainder, so that the mean is exact.

    bf16 is the upper half of fp32's bits: adding a uniform 16-bit number to the lower half carries into the upper half
    with a probability equal to the remainder, and the lower half is then dropped.

    Args:
        values: finite fp32 tensor of any shape; the device's generator supplies the random bits.

    Returns:
        bf16 tensor of the same shape. A value that bf16 holds exactly is returned as it is.
    """
    if values.device.type == "xla":
        return _round_by_arithmetic(values)
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device)
    return (bits + noise).bitwise_and(-(1 << 16)).view(torch.float32).to(torch.bfloat16)


def _round_by_arithmetic(values: torch.Tensor) -> torch.Tensor:
    """The same without looking at bits, which torch_xla can only do on the host, in the middle of the graph.

    A value is a whole number and a fraction of bf16's spacing at its size, 2**(exponent - 7). All of this is exact in
    fp32; below 2**-119, where the spacing is no normal number, it rounds to nearest.
    """
    size = values.abs()
    # A logarithm may be off by one next to a power of two; what it says is put right by comparing.
    exponent = size.log2().floor().clamp(-126, 127)
    power = _power_of_two(exponent)
    exponent = exponent - (size < power).float() + (size >= 2 * power).float()
    spacing = _power_of_two(exponent.clamp(-119, 127)) * 2.0**-7
    steps = values / spacing
    whole = steps.floor()
    up = torch.rand(values.shape, device=values.device) < steps - whole
    rounded = (whole + up.float()) * spacing
    return torch.where((size >= 2.0**-119) & torch.isfinite(values), rounded, values).to(torch.bfloat16)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Returns 2**exponent exactly, for whole numbers from -126 to 127."""
    table = torch.exp2(torch.arange(-126, 128, dtype=torch.float64)).float().to(exponent.device)
    return table[(exponent + 126).long().reshape(-1)].reshape(exponent.shape)
