"""From the arguments of a component to a torchx AppDef; pure functions, no torch and no scheduler."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torchx.specs as specs

from trn_dist.errors import ConfigError
from trn_dist.launcher.macros import keep_dollars

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A pair starts at the beginning or behind a comma or semicolon; anything else belongs to the value before it.
_PAIR = re.compile(r"(?:^|[,;])\s*([A-Za-z_][A-Za-z0-9_]*)=")
# Quotes open where a value or a word of it does, so that an apostrophe within a word is none.
_QUOTED = re.compile(r"""(?<![^\s=,;])(?:'[^']*'|"[^"]*")""")

DEBUG_ENVIRONMENT = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "XLA_IR_DEBUG": "1",
    "XLA_HLO_DEBUG": "1",
    "NEURON_RT_LOG_LEVEL": "INFO",
}


@dataclass(frozen=True)
class Layout:
    """How many processes run where.

    Attributes:
        min_nodes: nodes that a job starts with at least, or None when it is not elastic.
        nodes: nodes that it has at most.
        processes: worker processes on each node.
    """

    min_nodes: int | None
    nodes: int
    processes: int

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads torchx's `[[MIN:]NODES x]PROCESSES`: `2`, `1x2`, `2:4x32`.

        Raises:
            ConfigError: it is not of that form, or a number is 0.
        """
        match = re.fullmatch(r"(?:(?:(\d+):)?(\d+)x)?(\d+)", text)
        if not match:
            raise ConfigError(f"-j {text!r} is not of the form [[MIN:]NODES x]PROCESSES, such as 2, 1x2 or 2:4x32")
        low, high, processes = (int(part) if part else None for part in match.groups())
        layout = cls(low, high if high is not None else 1, processes or 0)
        if layout.nodes < 1 or layout.processes < 1 or (low is not None and not 1 <= low <= layout.nodes):
            raise ConfigError(
                f"-j {text!r} asks for {layout.nodes} nodes{f' (at least {low})' if low is not None else ''} of "
                f"{layout.processes} processes: each must be at least 1, and the minimum at most the maximum"
            )
        return layout

    @property
    def nnodes(self) -> str:
        """What torchrun's `--nnodes` takes."""
        return str(self.nodes) if self.min_nodes is None else f"{self.min_nodes}:{self.nodes}"


def parse_environment(text: str | Mapping[str, str] | None) -> dict[str, str]:
    """Reads `A=1,B=x=y,C='p,q=r'` into a dict; a mapping is copied.

    A comma or semicolon starts a new pair only where `NAME=` follows, so values may hold `=`, `,` and `;`. A part in
    quotes is taken as it is, without its quotes.

    Raises:
        ConfigError: there is no pair, or text before the first one.
    """
    if text is None or isinstance(text, Mapping):
        return dict(text or {})
    if not text.strip():
        return {}
    # Quoted parts are blanked for the search, so that no pair starts inside them.
    blanked = _QUOTED.sub(lambda quoted: " " * len(quoted[0]), text)
    starts = list(_PAIR.finditer(blanked))
    if not starts or starts[0].start() != 0 or text[0] in ",;":
        raise ConfigError(f"the environment {text!r} is not of the form NAME=VALUE,NAME=VALUE")
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return {
        match[1]: _QUOTED.sub(lambda quoted: quoted[0][1:-1], text[match.end() : end].strip())
        for match, end in zip(starts, ends, strict=True)
    }


def read_environment_file(path: str) -> dict[str, str]:
    """Reads a file of `NAME=VALUE` lines; the value is everything behind the first `=`.

    Empty lines and lines that start with `#` are passed over.

    Raises:
        ConfigError: the file is not there, or a line is of another form; the message names it.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the environment file {path} cannot be read: {error}") from error
    environment = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not _NAME.fullmatch(name.strip()):
            raise ConfigError(f"{path}, line {number}: {line!r} is not of the form NAME=VALUE")
        environment[name.strip()] = value
    return environment


def split_name(name: str, script: str | None, module: str | None) -> tuple[str, str]:
    """Splits torchx's `[EXPERIMENT/][RUN]` into the experiment's and the run's name.

    Without a run name the script's or module's stands in; without an experiment, torchx's `default-experiment`.

    Raises:
        ConfigError: more than one slash.
    """
    if name.count("/") > 1:
        raise ConfigError(f"--name {name!r} is not of the form EXPERIMENT/RUN, EXPERIMENT/, /RUN or RUN")
    experiment, slash, run = name.rpartition("/")
    return (experiment if slash and experiment else "default-experiment"), run or role_name(script, module)


def role_name(script: str | None, module: str | None) -> str:
    """Returns the script's or module's own name, without what breaks the variables that schedulers derive from it."""
    stem = Path(script).stem if script else (module or "").rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9]+", "_", stem).strip("_").lower() or "worker"


def make_environment(env: str | Mapping[str, str] | None, env_file: str | None, *, debug: bool) -> dict[str, str]:
    """Returns the variables of a job: the file's, then `env`'s over them, then defaults for what neither sets."""
    environment = read_environment_file(env_file) if env_file else {}
    environment.update(parse_environment(env))
    defaults = {"LOGLEVEL": os.environ.get("LOGLEVEL", "WARNING"), **(DEBUG_ENVIRONMENT if debug else {})}
    return {**defaults, **environment}


def make_ddp(
    *,
    script_args: Sequence[str],
    script: str | None,
    module: str | None,
    image: str,
    name: str,
    resource: specs.Resource,
    layout: Layout,
    environment: Mapping[str, str],
    max_retries: int,
    max_restarts: int,
    rdzv_port: int,
    rdzv_backend: str,
    mounts: list[specs.BindMount | specs.VolumeMount | specs.DeviceMount],
    python: str,
    tee: int,
) -> specs.AppDef:
    """Returns the AppDef of `trn_dist.components:ddp`, whose docstring describes the arguments.

    Raises:
        ConfigError: not exactly one of script and module, or another argument that cannot be.
    """
    if (script is None) == (module is None):
        raise ConfigError("name what to run with --script FILE or with -m MODULE: exactly one of the two")
    experiment, run = split_name(name, script, module)
    arguments = ["-u", "-m", "trn_dist.launcher.agent", "--processes", str(layout.processes)]
    if layout.nodes > 1:
        arguments += ["--rank0_env", specs.macros.rank0_env, "--rdzv_port", str(rdzv_port)]
    else:
        # Port 0: torchelastic takes a free one, so that jobs on one machine do not meet.
        arguments += ["--rdzv_endpoint", "localhost:0"]
    arguments += ["--rdzv_backend", rdzv_backend if layout.nodes > 1 else "c10d"]
    arguments += ["--rdzv_id", specs.macros.app_id, "--nnodes", layout.nnodes]
    arguments += ["--max_restarts", str(max_restarts), "--tee", str(tee), "--role", ""]
    if layout.nodes > 1 and rdzv_backend == "static":
        arguments += ["--node_rank", specs.macros.replica_id]
    # torchrun's parser drops the first `--` that it meets; this one is given up so that the script keeps its own.
    arguments += ["--", script] if script is not None else ["-m", "--", str(module)]
    role = specs.Role(
        name=role_name(script, module),
        image=image,
        min_replicas=layout.min_nodes,
        num_replicas=layout.nodes,
        # Without an image the replicas run on this machine, where this interpreter has what they need.
        entrypoint=python or ("python" if image else sys.executable),
        args=[*arguments, *map(keep_dollars, script_args)],
        env={
            "TORCHX_TRACKING_EXPERIMENT_NAME": experiment,
            **{name: keep_dollars(value) for name, value in environment.items()},
        },
        resource=resource,
        port_map={"c10d": rdzv_port},
        max_retries=max_retries,
        mounts=mounts,
    )
    return specs.AppDef(name=run, roles=[role])
