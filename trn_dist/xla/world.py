"""The world of a job: which process this is, its device, and the collectives that join the processes.

One interface, three implementations, chosen by `init`:

- `neuron`: PyTorch/XLA on NeuronCores; collectives are part of the compiled graph.
- `cpu-xla`: PyTorch/XLA on the host's CPU. torch_xla's CPU client has no collectives between processes (its own are
  silent no-ops there), so reductions go over gloo, on the XLA buffers themselves.
- `cpu`: plain PyTorch, whose process group does the work.

Barriers and object exchange go over gloo on every device: they must work, and tell the truth, when the device does not.
"""

from __future__ import annotations

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

import torch
import torch.distributed as dist

from trn_dist.errors import ConfigError, MissingDependencyError, WorldError
from trn_dist.xla.compile_log import CompileLog
from trn_dist.xla.place import Place
from trn_dist.xla.process import end_with_launcher

DEVICES = ("auto", "neuron", "cpu-xla", "cpu")

# By which rule `derive_seed` gets seeds; a run that was begun under another cannot go on as it was.
RANDOM_NUMBERS = "sha256 of seed/purpose/step/..., first 31 bits"

ReduceOp = Literal["sum", "mean"]


class EndOfTrace(Exception):  # noqa: N818 - it ends a trace as StopIteration ends a loop
    """Raised in `World.tracing_only` where the graph under construction would be executed."""


class World(ABC):
    """The processes of a job and the device of this one. Made by `init`; usable as a context manager.

    Attributes:
        kind: `neuron`, `cpu-xla` or `cpu`.
        device: the torch device of this process's tensors.
        rank: index of this process over the job.
        size: number of processes of the job.
        local_rank: index of this process on its host.
        local_size: number of processes on this host.
        joined_seconds: how long it took to join the job, the check of the world included.
        waited_seconds: time spent so far in reductions on the host, the wait for the other ranks included.
        compile_log: where in the program graphs were compiled; on an XLA device only.
    """

    kind: ClassVar[str]
    device: torch.device
    compile_log: CompileLog

    def __init__(self, place: Place, timeout: timedelta) -> None:
        self._tracing_only = False
        self.joined_seconds = self.waited_seconds = 0.0
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self._owns_process_group = not dist.is_initialized()
        self._host_group = _host_group(place, timeout)

    # What each device does its own way.

    @abstractmethod
    def all_reduce_(self, tensors: Sequence[torch.Tensor], op: ReduceOp = "mean") -> None:
        """Replaces each tensor, in place, by its sum or mean over the world.

        Every rank passes tensors of the same shapes and dtypes in the same order.

        Args:
            tensors: contiguous tensors on `device`, of any shape and floating-point dtype.
            op: `sum` or `mean`.
        """

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "mean") -> torch.Tensor:
        """Returns the sum or mean of `tensor` over the world; see `all_reduce_`."""
        total = tensor.detach().clone()
        self.all_reduce_([total], op)
        return total

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensors of all ranks, [size, *shape of tensor], in rank order.

        Args:
            tensor: on `device`, of the same shape and dtype on every rank.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Returns the tensor of rank `source`.

        Args:
            tensor: on `device`, of the same shape and dtype on every rank; only the source's values count.
            source: a rank.
        """

    @abstractmethod
    def sync(self, *, wait: bool = False) -> None:
        """Ends the graph under construction and starts its execution; does nothing on an eager device.

        Args:
            wait: return only when the execution has finished.
        """

    @abstractmethod
    def seed(self, value: int) -> None:
        """Sets the seed of this process's device generator (dropout, stochastic rounding)."""

    @abstractmethod
    def host_views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns CPU tensors with the values of `tensors`, without a copy where the device's memory is the host's.

        The views are for reading and live until the next step changes the tensors. Pending work is executed first.
        """

    def snapshot(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns CPU tensors with the values of `tensors` at this point, which no later step changes."""
        return [view.clone() for view in self.host_views(tensors)]

    @contextmanager
    def tracing_only(self) -> Iterator[None]:
        """In its body the first call that would execute the graph or meet the other ranks raises `EndOfTrace`."""
        self._tracing_only = True
        try:
            yield
        finally:
            self._tracing_only = False

    # Control plane, over gloo on every device.

    def barrier(self) -> None:
        """Waits until every rank is here."""
        dist.barrier(group=self._host_group)

    def all_gather_object(self, value: Any) -> list[Any]:  # noqa: ANN401 - any picklable value
        """Returns the values that all ranks passed, in rank order. They travel pickled between the job's own ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._host_group)
        return values

    def broadcast_object(self, value: Any, source: int = 0) -> Any:  # noqa: ANN401 - any picklable value
        """Returns the value that rank `source` passed; what the other ranks pass is ignored."""
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self._host_group)
        return box[0]

    def print(self, text: str) -> None:
        """Prints on rank 0 alone."""
        if self.rank == 0:
            print(text, flush=True)

    def require_equal(self, **facts: object) -> None:
        """Proves that all ranks agree before any of them trains on a disagreement.

        Args:
            **facts: named values with a stable `str()`, such as settings, a data fingerprint or a hash of the weights.

        Raises:
            ConfigError: on every rank, naming the fact, the values, and the ranks that hold each.
        """
        texts = {name: str(value) for name, value in facts.items()}
        by_rank = self.all_gather_object(texts)
        for name in texts:
            holders: dict[str, list[int]] = {}
            for rank, theirs in enumerate(by_rank):
                holders.setdefault(theirs.get(name, "(nothing)"), []).append(rank)
            if len(holders) > 1:
                groups = "; ".join(f"{_ranks(ranks)}: {value}" for value, ranks in holders.items())
                raise ConfigError(
                    f"the ranks do not agree on {name}: {groups}. "
                    "Start every rank from the same code, arguments, data and image"
                )

    def close(self) -> None:
        """Leaves the job. Ranks that are still at work are not waited for: call `barrier` first if they should be."""
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A rank that fails keeps its connections until its process ends: closed now, the others would fail of it and
        # could be gone, and be taken for the cause, before this one's exit code is known.
        if self.size == 1 or kind is None or not issubclass(kind, Exception):
            self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind} rank {self.rank} of {self.size} on {self.device}>"

    def _reduce_on_host(self, tensors: Sequence[torch.Tensor], op: ReduceOp) -> None:
        """All-reduces CPU tensors in place over gloo."""
        begin = time.perf_counter()
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._host_group)
            if op == "mean":
                tensor.div_(self.size)
        self.waited_seconds += time.perf_counter() - begin

    def _gather_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        begin = time.perf_counter()
        dist.all_gather(parts, tensor.contiguous(), group=self._host_group)
        self.waited_seconds += time.perf_counter() - begin
        return torch.stack(parts)

    def _broadcast_on_host(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        received = tensor.detach().clone(memory_format=torch.contiguous_format)
        begin = time.perf_counter()
        dist.broadcast(received, src=source, group=self._host_group)
        self.waited_seconds += time.perf_counter() - begin
        return received

    def _prove(self) -> None:
        """All-reduces known numbers; a world that does not hold together fails here and not in the loss curve."""
        mine = torch.tensor([1.0, self.rank + 1.0, (self.rank + 1.0) ** 2])
        probe = mine.to(self.device)
        self.all_reduce_([probe], op="sum")
        (seen,) = self.host_views([probe])
        n = float(self.size)
        expected = torch.tensor([n, n * (n + 1) / 2, n * (n + 1) * (2 * n + 1) / 6])
        # The largest entry is exact in fp32 up to 290 ranks; beyond that its rounding is far below one rank's share.
        if not torch.allclose(seen, expected, rtol=1e-5, atol=0.0):
            raise WorldError(
                f"rank {self.rank}: an all-reduce of known numbers over {self.size} ranks on {self.kind} gave "
                f"{seen.tolist()} instead of {expected.tolist()}: the ranks are not joined on this device, and "
                "training would silently go on with each rank alone. Check that every rank runs the same image and "
                "was started by one torchrun job"
            )


class NativeWorld(World):
    """Plain PyTorch on the CPU; the process group (gloo) reduces the tensors themselves."""

    kind = "cpu"

    def __init__(self, place: Place, timeout: timedelta) -> None:
        super().__init__(place, timeout)
        self.device = torch.device("cpu")

    def all_reduce_(self, tensors: Sequence[torch.Tensor], op: ReduceOp = "mean") -> None:
        """See `World.all_reduce_`."""
        self._reduce_on_host(tensors, op)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `World.all_gather`."""
        return self._gather_on_host(tensor.detach())

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """See `World.broadcast`."""
        return self._broadcast_on_host(tensor, source)

    def sync(self, *, wait: bool = False) -> None:
        """Does nothing: eager work is done when the call returns."""

    def seed(self, value: int) -> None:
        """See `World.seed`."""
        torch.manual_seed(value)

    def host_views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `World.host_views`."""
        return [tensor.detach() for tensor in tensors]


def init(device: str = "auto", *, timeout: timedelta = timedelta(minutes=30)) -> World:
    """Joins this process to its job and proves that the job holds together.

    Reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them; without them the world has one
    process (a notebook, a unit test). An existing default process group is used as it is and never destroyed. Under
    torchrun this process is killed when its agent dies, so that it does not train on beside the job that replaces it.

    Args:
        device: `neuron`, `cpu-xla`, `cpu`, or `auto`: Neuron where the host has Neuron devices, else CPU XLA.
        timeout: how long a collective of the control plane waits for the slowest rank.

    Raises:
        ConfigError: an unknown device, a contradictory environment, or a device that is not the one asked for.
        MissingDependencyError: the packages of the device are not installed.
        WorldError: the self-check found ranks that are not joined.
    """
    begin = time.perf_counter()
    end_with_launcher()
    kind = resolve_device(device)
    place = Place.from_environment()
    world: World
    if kind == "cpu":
        world = NativeWorld(place, timeout)
    else:
        _require_torch_xla(kind)
        _require_pjrt_device(kind)
        from trn_dist.xla.pjrt import CpuXlaWorld, NeuronWorld

        world = (NeuronWorld if kind == "neuron" else CpuXlaWorld)(place, timeout)
    world._prove()
    world.joined_seconds = time.perf_counter() - begin
    return world


def derive_seed(*parts: object) -> int:
    """Returns a 31-bit seed that depends on all the parts and on nothing else (SHA-256 of their texts)."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def resolve_device(device: str, *, environment: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> str:
    """Returns the device that `init` would open: `neuron`, `cpu-xla` or `cpu`. Opens nothing.

    Args:
        device: as for `init`.
        environment: of this process.
        dev: folder of the device files.

    Raises:
        ConfigError: an unknown device, a Neuron device that was asked for and is not there, or an environment that is
            set up for Neuron on a host without it.
    """
    if device not in DEVICES:
        raise ConfigError(f"unknown device {device!r}: choose one of {', '.join(DEVICES)}")
    has_neuron = any(dev.glob("neuron[0-9]*"))
    if device == "neuron" and not has_neuron:
        raise ConfigError(
            "device 'neuron' was asked for, but this host has no Neuron device (/dev/neuron*): "
            "request aws.amazon.com/neuron for the pod, check the driver with neuron-ls, or choose 'cpu-xla'"
        )
    if device != "auto":
        return device
    if has_neuron:
        return "neuron"
    meant_for_neuron = sorted(name for name in environment if name.startswith("NEURON_RT_"))
    if environment.get("PJRT_DEVICE") == "NEURON" or meant_for_neuron:
        reason = ", ".join(meant_for_neuron) or "PJRT_DEVICE=NEURON"
        raise ConfigError(
            f"the environment is set up for Neuron ({reason}), but this host has no Neuron device (/dev/neuron*): "
            "check the pod's request for aws.amazon.com/neuron, or choose the device 'cpu-xla' yourself"
        )
    return "cpu-xla"


def _require_torch_xla(kind: str) -> None:
    for module, extra in (("torch_xla", "xla"), ("torch_neuronx", "neuron")):
        if find_spec(module) is None and (module == "torch_xla" or kind == "neuron"):
            extra = "neuron" if kind == "neuron" else extra
            raise MissingDependencyError(
                f"device '{kind}' needs the package {module}, which is not installed: "
                f"pip install 'trn-dist[{extra}]' (or choose the device 'cpu')"
            )


def _require_pjrt_device(kind: str) -> None:
    """Tells torch_xla which device to open, before it is imported; left alone it guesses, with a warning."""
    wanted = "NEURON" if kind == "neuron" else "CPU"
    found = os.environ.setdefault("PJRT_DEVICE", wanted)
    if found != wanted:
        raise ConfigError(
            f"device '{kind}' was asked for, but the environment sets PJRT_DEVICE={found}: "
            f"unset it or set it to {wanted}"
        )


def _host_group(place: Place, timeout: timedelta) -> dist.ProcessGroup | None:
    """Returns the gloo group of the control plane; None stands for the default group."""
    if not dist.is_initialized():
        if place.size == 1:
            # No launcher: a store in this process's memory, so that no port is opened.
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group("gloo", timeout=timeout)
        return None
    if (dist.get_rank(), dist.get_world_size()) != (place.rank, place.size):
        raise ConfigError(
            f"the process group that exists has rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"but the environment says rank {place.rank} of {place.size}"
        )
    if "gloo" in dist.get_backend():
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def _ranks(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
