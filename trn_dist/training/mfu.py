"""Model FLOPs utilization: the share of the hardware's peak that goes into the model's own arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from trn_dist.errors import ConfigError

FORMULA = "flops_per_sequence * sequences_per_second / (world_size * peak_flops)"

# Peak of dense matrix products per worker, in operations per second. A worker is a NeuronCore-v2 on trn1 and a logical
# NeuronCore of two physical ones (LNC=2, the default) on trn2. Sources: the Neuron documentation's pages on the chips,
# 3,040 TFLOPS BF16 and 760 TFLOPS FP32 for the 32 cores of trn1.32xlarge, and 667 TFLOPS BF16 a chip of 4 logical cores
# for trn2. What they do not say is not here.
PEAK_FLOPS: dict[str, dict[str, float]] = {
    "trn1": {"bf16": 3040e12 / 32, "fp32": 760e12 / 32},
    "trn2": {"bf16": 667e12 / 4},
}


@dataclass(frozen=True)
class Utilization:
    """What model FLOPs utilization is computed from.

    Attributes:
        flops_per_sequence: operations of training on one sequence (forward and backward), such as
            `BertConfig.flops_per_sequence`.
        peak_flops: operations per second that one worker's hardware can do at most.
    """

    flops_per_sequence: float
    peak_flops: float

    def of(self, sequences_per_second: float, world_size: int) -> float:
        """Returns the utilization, 0 to 1 (`FORMULA`)."""
        return self.flops_per_sequence * sequences_per_second / (world_size * self.peak_flops)


def peak_flops(machine: str, dtype: str) -> float:
    """Returns the peak of one worker on a machine of a family, in operations per second.

    Args:
        machine: `trn1` or `trn2`, or an instance type of theirs such as `trn1.32xlarge`.
        dtype: of the matrix products, `bf16` or `fp32`.

    Raises:
        ConfigError: the table does not have it.
    """
    family = machine.split(".")[0].rstrip("nu")
    try:
        return PEAK_FLOPS[family][dtype]
    except KeyError:
        known = "; ".join(f"{name}: {', '.join(dtypes)}" for name, dtypes in PEAK_FLOPS.items())
        raise ConfigError(f"the peak of {dtype} on {machine} is not in the table ({known}): give the number") from None
