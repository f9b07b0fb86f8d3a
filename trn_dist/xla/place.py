"""This process's place in the job, as the launcher's environment announces it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trn_dist.errors import ConfigError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Place:
    """Where this process stands among the processes of its job.

    Attributes:
        rank: index over all processes of the job, 0 <= rank < size.
        size: number of processes of the job.
        local_rank: index over the processes of this host, 0 <= local_rank < local_size.
        local_size: number of processes of this host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Place":
        """Reads the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE).

        Returns:
            The place; a single process when none of the variables is set.

        Raises:
            ConfigError: some variables are set and others are not, one is not a whole number, or they contradict each
                other.
        """
        present = [name for name in _VARIABLES if name in environment]
        if not present:
            return cls()
        missing = [name for name in _VARIABLES if name not in environment]
        if missing:
            raise ConfigError(
                f"the environment sets {', '.join(present)} but not {', '.join(missing)}: "
                "start the script with torchrun or torchx, or unset them all to run one process"
            )
        values = {}
        for name in _VARIABLES:
            try:
                values[name] = int(environment[name])
            except ValueError:
                raise ConfigError(
                    f"the environment variable {name} is {environment[name]!r}, not a whole number"
                ) from None
        rank, size, local_rank, local_size = (values[name] for name in _VARIABLES)
        if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
            raise ConfigError(
                f"the environment contradicts itself: RANK={rank} of WORLD_SIZE={size}, "
                f"LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_size}"
            )
        return cls(rank=rank, size=size, local_rank=local_rank, local_size=local_size)
