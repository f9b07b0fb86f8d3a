"""The worlds of PyTorch/XLA: NeuronCores, and the host's CPU.

Imported only when an XLA device is asked for; importing torch_xla starts no client, the first use of the device does.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch.utils import dlpack as torch_dlpack
from torch_xla.utils import dlpack as xla_dlpack

from trn_dist.errors import ConfigError, WorldError
from trn_dist.xla import lock
from trn_dist.xla.compile_log import CompileLog
from trn_dist.xla.place import Place
from trn_dist.xla.world import EndOfTrace, ReduceOp, World


class XlaWorld(World):
    """What the worlds of PyTorch/XLA share: the lazy graph, its device and its generator."""

    def _open_device(self, pjrt_device: str) -> None:
        """Starts the PJRT client, and refuses any other device than `pjrt_device`."""
        self.compile_log = CompileLog()
        lock.record(self.kind, self.rank, self.size)
        self.device = torch_xla.device()
        found = xr.device_type()
        if found != pjrt_device:
            raise ConfigError(
                f"device '{self.kind}' was asked for, but torch_xla opened {found}: it was started before "
                "trn_dist.xla.init() with another PJRT_DEVICE, or the plugin of the device did not load"
            )

        self._try_autograd()

    def _try_autograd(self) -> None:
        """Records a backward pass on the device; nothing is compiled. It fails where the device was opened too late."""
        probe = torch.ones(1, device=self.device, requires_grad=True)
        try:
            (probe * 2).sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            raise ConfigError(
                "this process ran a backward pass before it opened its XLA device, and PyTorch counts the devices only "
                "once, at the first backward pass: call trn_dist.xla.init() before any"
            ) from error

    def sync(self, *, wait: bool = False) -> None:
        """See `World.sync`."""
        if self._tracing_only:
            raise EndOfTrace
        torch_xla.sync(wait=wait)

    def seed(self, value: int) -> None:
        """See `World.seed`."""
        torch_xla.manual_seed(value)  # type: ignore[no-untyped-call]


class CpuXlaWorld(XlaWorld):
    """PyTorch/XLA on the CPU: a graph per process, joined by gloo between the graphs."""

    kind = "cpu-xla"

    def __init__(self, place: Place, timeout: timedelta) -> None:
        super().__init__(place, timeout)
        self._open_device("CPU")

    @torch.no_grad()
    def all_reduce_(self, tensors: Sequence[torch.Tensor], op: ReduceOp = "mean") -> None:
        """See `World.all_reduce_`. Cuts the graph: what the tensors depend on is executed first."""
        if self.size == 1:
            return
        if self._tracing_only:
            raise EndOfTrace
        executed = _execute(tensors)
        self._reduce_on_host([_alias(tensor) for tensor in executed], "sum")
        for tensor, total in zip(tensors, executed, strict=True):
            # Nothing is copied where the tensor owns its buffer; a view hands the result on to its base. The mean is
            # part of the next graph, where it costs no pass of its own.
            tensor.copy_(total if op == "sum" else total * (1.0 / self.size))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `World.all_gather`. Cuts the graph."""
        return self._gather_on_host(self._on_host(tensor)).to(self.device)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """See `World.broadcast`. Cuts the graph."""
        return self._broadcast_on_host(self._on_host(tensor), source).to(self.device)

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._tracing_only:
            raise EndOfTrace
        (view,) = self.host_views([tensor])
        return view

    def host_views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `World.host_views`.

        The returned tensors alias the PJRT buffers (about 2 microseconds whatever the size, where `.cpu()` copies at
        about 0.4 GB/s).
        """
        return [_alias(tensor) for tensor in _execute(tensors)]

    def snapshot(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `World.snapshot`.

        Without a copy: a step writes new buffers, and PJRT does not reuse one that a host tensor still refers to. The
        price is that the old buffers stay in memory as long as the snapshot does.
        """
        return self.host_views(tensors)


class NeuronWorld(XlaWorld):
    """PyTorch/XLA on NeuronCores: one core a process, collectives inside the compiled graph.

    torch_xla sets the NEURON_PJRT_* variables and NEURON_RT_ROOT_COMM_ID itself under torchrun. Not run on hardware by
    this project's tests.
    """

    kind = "neuron"

    def __init__(self, place: Place, timeout: timedelta) -> None:
        super().__init__(place, timeout)
        self._open_device("NEURON")
        if xr.world_size() != place.size:
            raise WorldError(
                f"rank {place.rank}: the launcher announced {place.size} processes, but the Neuron runtime joined "
                f"{xr.world_size()}: check NEURON_PJRT_WORLD_SIZE, NEURON_PJRT_PROCESSES_NUM_DEVICES and "
                "NEURON_RT_VISIBLE_CORES, which are best left unset under torchrun"
            )

    def all_reduce_(self, tensors: Sequence[torch.Tensor], op: ReduceOp = "mean") -> None:
        """See `World.all_reduce_`. Adds a collective a tensor to the graph; nothing is executed here."""
        scale = 1.0 / self.size if op == "mean" else 1.0
        for tensor in tensors:
            # One each, so that the first can run while what the next depends on is still being computed.
            xm.all_reduce(xm.REDUCE_SUM, [tensor], scale=scale, groups=[list(range(self.size))])

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `World.all_gather`. Adds a collective to the graph."""
        everyone = [list(range(self.size))]
        # With a pinned layout torch_xla makes it an all-reduce of the size of the result.
        gathered: torch.Tensor = xm.all_gather(tensor.detach().unsqueeze(0), dim=0, groups=everyone, pin_layout=False)
        return gathered

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """See `World.broadcast`. Adds an all-reduce of the source's values and the others' zeros to the graph."""
        # Which rank this is must be data: every rank then has the same graph.
        is_source = torch.tensor([self.rank == source]).to(self.device)
        part = torch.where(is_source, tensor.detach(), torch.zeros_like(tensor))
        xm.all_reduce(xm.REDUCE_SUM, [part], groups=[list(range(self.size))])
        return part

    def host_views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `World.host_views`. The device's memory is its own, so these are copies."""
        torch_xla.sync()
        return [tensor.detach().cpu() for tensor in tensors]

    def snapshot(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `World.snapshot`."""
        return self.host_views(tensors)


def _execute(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Executes what is pending and returns XLA tensors that have buffers, outside autograd."""
    detached = [tensor.detach() for tensor in tensors]
    torch_xla.sync(wait=True)
    # A view of a tensor that was changed in place is still not executed then; this call does nothing for the others.
    xm.unlazy(detached)
    return detached


def _alias(executed: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor on the buffer of an XLA tensor; one without a buffer would abort the process here."""
    alias: torch.Tensor = torch_dlpack.from_dlpack(xla_dlpack.to_dlpack(executed))
    return alias
