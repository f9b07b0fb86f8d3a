"""Optimizers whose state is fp32 and exists before the first step, so that every step has the same graph.

The learning rate and the bias corrections reach the device as data, never as constants: no value of theirs makes a new
graph. Gradients are passed in by name, in fp32, because PyTorch refuses an fp32 `.grad` on a bf16 parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping

import torch

from trn_dist.errors import CheckpointError, ConfigError
from trn_dist.training.precision import round_stochastically

_MASTER = "master"


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """The usual choice of what decays: weight matrices and embeddings, not biases and layer norms."""
    del name
    return parameter.dim() > 1


class Optimizer(ABC):
    """What the optimizers share: fp32 state by parameter name, master weights, rounding, and saving.

    Args:
        named_parameters: names and parameters, as `model.named_parameters()` gives them; frozen ones are left out.
        weight_decay: decoupled weight decay of the parameters that decay.
        decays: tells from a name and a parameter whether it decays.
        master_weights: keep an fp32 copy of the weights; the parameters are its rounding.
        stochastic_rounding: round updates to bf16 parameters at random, in code. On Neuron the hardware does it.

    Attributes:
        steps: number of steps taken.
        state: for each slot (such as `exp_avg`) a tensor per parameter name.

    Raises:
        ConfigError: no parameter wants a gradient, or master weights together with stochastic rounding.
    """

    slots: tuple[str, ...]

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        weight_decay: float = 0.01,
        decays: Callable[[str, torch.Tensor], bool] = is_matrix,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        if master_weights and stochastic_rounding:
            raise ConfigError(
                "master weights and stochastic rounding cancel each other: the fp32 copy already keeps what rounding "
                "would lose. Choose one"
            )
        self.parameters = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        if not self.parameters:
            raise ConfigError("the optimizer was given no parameter that requires a gradient")
        self.weight_decay = weight_decay
        self.decaying = {name for name, parameter in self.parameters.items() if decays(name, parameter)}
        self.stochastic_rounding = stochastic_rounding
        self.steps = 0
        self.state = {
            slot: {name: torch.zeros_like(p, dtype=torch.float32) for name, p in self.parameters.items()}
            for slot in self.slots
        }
        if master_weights:
            self.state[_MASTER] = {name: p.detach().float().clone() for name, p in self.parameters.items()}

    @abstractmethod
    def host_factors(self, learning_rate: float) -> list[float]:
        """Returns the numbers that change from step to step, computed in float64 for the step `self.steps`."""

    @abstractmethod
    def update(
        self, name: str, weight: torch.Tensor, gradient: torch.Tensor, factors: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Advances the state of one parameter and returns its new fp32 weight."""

    @torch.no_grad()
    def step(self, gradients: Mapping[str, torch.Tensor], learning_rate: float) -> None:
        """Updates every parameter.

        Args:
            gradients: for each parameter name its gradient, in the parameter's shape and any floating dtype.
            learning_rate: of this step.
        """
        self.steps += 1
        device = next(iter(self.parameters.values())).device
        factors = torch.tensor(self.host_factors(learning_rate), dtype=torch.float32).to(device).unbind()
        masters = self.state.get(_MASTER)
        for name, parameter in self.parameters.items():
            weight = masters[name] if masters else parameter.float()
            updated = self.update(name, weight, gradients[name].float(), factors)
            if masters:
                masters[name].copy_(updated)
            if self.stochastic_rounding and parameter.dtype == torch.bfloat16:
                updated = round_stochastically(updated)
            parameter.copy_(updated)

    @torch.no_grad()
    def reset_master_weights(self) -> None:
        """Copies the parameters into the master weights, where there are any: call it after loading weights."""
        for name, master in self.state.get(_MASTER, {}).items():
            master.copy_(self.parameters[name])

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the whole state under flat names, `<slot>.<parameter name>`."""
        return {f"{slot}.{name}": tensor for slot, tensors in self.state.items() for name, tensor in tensors.items()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        """Restores what `state_tensors` returned, and the number of steps.

        Raises:
            CheckpointError: names or shapes differ from this optimizer's.
        """
        mine = self.state_tensors()
        if mine.keys() != tensors.keys():
            different = sorted(mine.keys() ^ tensors.keys())
            raise CheckpointError(
                f"the saved optimizer state has {len(tensors)} tensors and this optimizer {len(mine)}; "
                f"they differ in {', '.join(different[:3])}{' ...' if len(different) > 3 else ''}. "
                "Resume with the optimizer and model that wrote it"
            )
        for name, tensor in mine.items():
            if tensor.shape != tensors[name].shape:
                raise CheckpointError(
                    f"the saved optimizer state {name} has shape {tuple(tensors[name].shape)}, "
                    f"this optimizer's has {tuple(tensor.shape)}"
                )
            tensor.copy_(tensors[name])
        self.steps = steps


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2), the update of `torch.optim.AdamW`.

    Args:
        named_parameters: see `Optimizer`.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment; 1e-6 as in BERT's published recipe.
        **options: see `Optimizer`.
    """

    slots = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        decays: Callable[[str, torch.Tensor], bool] = is_matrix,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        super().__init__(
            named_parameters,
            weight_decay=weight_decay,
            decays=decays,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
        )
        self.betas, self.eps = betas, eps

    def host_factors(self, learning_rate: float) -> list[float]:
        """What decay leaves of a weight, the step size with the first bias correction, the root of the second one."""
        beta1, beta2 = self.betas
        return [
            1 - learning_rate * self.weight_decay,
            learning_rate / (1 - beta1**self.steps),
            (1 - beta2**self.steps) ** 0.5,
        ]

    def update(
        self, name: str, weight: torch.Tensor, gradient: torch.Tensor, factors: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """See `Optimizer.update`."""
        kept, step_size, root_correction = factors
        mean, square = _moments(self.state, name, gradient, self.betas)
        if name in self.decaying:
            weight = weight * kept
        return weight - step_size * (mean / (square.sqrt() / root_correction + self.eps))


class Lamb(Optimizer):
    """LAMB (You et al. 2020, algorithm 2): Adam's direction, scaled per parameter by ||weight|| / ||direction||.

    Parameters that do not decay (biases, layer norms) take the direction unscaled, as the published large-batch BERT
    recipes do.

    Args:
        named_parameters: see `Optimizer`.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        trust_clip: bound the ratio by 1, as the tutorial's LAMB runs do.
        **options: see `Optimizer`.
    """

    slots = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        trust_clip: bool = True,
        weight_decay: float = 0.01,
        decays: Callable[[str, torch.Tensor], bool] = is_matrix,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        super().__init__(
            named_parameters,
            weight_decay=weight_decay,
            decays=decays,
            master_weights=master_weights,
            stochastic_rounding=stochastic_rounding,
        )
        self.betas, self.eps, self.trust_clip = betas, eps, trust_clip

    def host_factors(self, learning_rate: float) -> list[float]:
        """The learning rate and the inverses of the two bias corrections."""
        beta1, beta2 = self.betas
        return [learning_rate, 1 / (1 - beta1**self.steps), 1 / (1 - beta2**self.steps)]

    def update(
        self, name: str, weight: torch.Tensor, gradient: torch.Tensor, factors: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """See `Optimizer.update`."""
        learning_rate, correct_mean, correct_square = factors
        mean, square = _moments(self.state, name, gradient, self.betas)
        direction = mean * correct_mean / ((square * correct_square).sqrt() + self.eps)
        if name not in self.decaying:
            return weight - learning_rate * direction
        direction = direction + self.weight_decay * weight
        weight_norm, direction_norm = weight.norm(), direction.norm()
        ratio = torch.where((weight_norm > 0) & (direction_norm > 0), weight_norm / direction_norm, 1.0)
        if self.trust_clip:
            ratio = ratio.clamp(max=1.0)
        return weight - learning_rate * ratio * direction


def _moments(
    state: Mapping[str, Mapping[str, torch.Tensor]], name: str, gradient: torch.Tensor, betas: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances and returns the running means of the gradient and of its square."""
    mean, square = state["exp_avg"][name], state["exp_avg_sq"][name]
    mean.mul_(betas[0]).add_(gradient, alpha=1 - betas[0])
    square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    return mean, square
