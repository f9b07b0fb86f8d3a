import pytest
import torch

from trn_dist.errors import ConfigError
from trn_dist.training import Precision


def test_names():
    names = ("fp32", "bf16", "bf16-master", "autocast")
    assert [Precision.named(name).name for name in names] == list(names)
    with pytest.raises(ConfigError, match="unknown precision 'fp16': choose one of fp32, bf16, bf16-master, autocast"):
        Precision.named("fp16")


@pytest.mark.parametrize(
    ("name", "given", "changes"),
    [
        ("fp32", {}, {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"}),
        ("bf16", {}, {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"}),
        ("bf16-master", {}, {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"}),
        (
            "autocast",
            {"NEURON_CC_FLAGS": "--model-type=transformer"},
            {
                "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
                "NEURON_CC_FLAGS": "--model-type=transformer --auto-cast=none",
            },
        ),
        ("autocast", {"NEURON_CC_FLAGS": "--auto-cast=none"}, {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"}),
    ],
)
def test_what_neuron_needs(name, given, changes):
    assert Precision.named(name).neuron_environment(given) == changes


@pytest.mark.parametrize(("name", "value"), [("bf16", "0"), ("fp32", "1"), ("bf16-master", "1")])
def test_a_contradicting_environment_is_refused(name, value):
    with pytest.raises(
        ConfigError, match=f"NEURON_RT_STOCHASTIC_ROUNDING_EN={value} contradicts the precision '{name}'"
    ):
        Precision.named(name).neuron_environment({"NEURON_RT_STOCHASTIC_ROUNDING_EN": value})


@pytest.mark.parametrize("variable", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16"])
def test_removed_variables_are_refused(variable):
    with pytest.raises(ConfigError, match=f"{variable} was removed .* choose the precision 'bf16'"):
        Precision.named("bf16").neuron_environment({variable: "1"})


def test_autocast_is_on_only_where_it_was_asked_for():
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    for name, dtype in {"fp32": torch.float32, "autocast": torch.bfloat16}.items():
        with Precision.named(name).autocast(torch.device("cpu")):
            assert (a @ b).dtype == dtype
