"""TorchX components for Trainium: `torchx run trn_dist.components:ddp`, or `torchx run trn_dist.ddp`.

torchx parses and executes this file on its own terms: annotations are the `typing` forms that all of its versions
read, imports are absolute, and everything but the components is elsewhere.
"""

from typing import List, Optional

import torchx.specs as specs

import trn_dist.launcher.app as trn_dist_app


def ddp(
    *script_args: str,
    script: Optional[str] = None,
    m: Optional[str] = None,
    image: str = "",
    name: str = "/",
    h: Optional[str] = None,
    cpu: int = 2,
    memMB: int = 1024,
    j: str = "1x2",
    env: Optional[str] = None,
    env_file: Optional[str] = None,
    max_retries: int = 0,
    max_restarts: int = 0,
    rdzv_port: int = 29500,
    rdzv_backend: str = "c10d",
    mounts: Optional[List[str]] = None,
    python: str = "",
    debug: bool = False,
    tee: int = 3,
) -> specs.AppDef:
    """Runs a PyTorch script data-parallel: one torchrun agent a node, any number of workers on each.

    Args:
        script_args: arguments of the script, behind --; they reach it as they are, but for torchx's own macros
        script: the script to run
        m: the Python module to run instead of a script
        image: container image; none for the local schedulers, which run in the current folder
        name: EXPERIMENT/RUN, EXPERIMENT/, /RUN or RUN; by default the run is named after the script
        h: a named resource of torchx, instead of cpu and memMB
        cpu: CPUs of a node
        memMB: memory of a node in MB
        j: [[MIN:]NODES x]PROCESSES, such as 2, 1x2 or 2:4x32
        env: environment variables, NAME=VALUE,NAME=VALUE; values may hold = and commas, quotes are optional
        env_file: file of NAME=VALUE lines; --env wins where both set a variable
        max_retries: how often the scheduler may start the job again
        max_restarts: how often torchrun may start the workers again within one life of the job
        rdzv_port: port of the rendezvous on the first node; one node alone takes a free one
        rdzv_backend: torchrun's rendezvous backend between several nodes
        mounts: what to mount, such as type=bind,src=/host,dst=/job
        python: the interpreter that runs the workers; by default the current one, or python where there is an image
        debug: more messages from torch, PyTorch/XLA and the Neuron runtime
        tee: which streams of the workers go to the console and to files: 0 none, 1 stdout, 2 stderr, 3 both
    """
    return trn_dist_app.make_ddp(
        script_args=script_args,
        script=script,
        module=m,
        image=image,
        name=name,
        resource=specs.resource(cpu=cpu, gpu=0, memMB=memMB, h=h),
        layout=trn_dist_app.Layout.parse(j),
        environment=trn_dist_app.make_environment(env, env_file, debug=debug),
        max_retries=max_retries,
        max_restarts=max_restarts,
        rdzv_port=rdzv_port,
        rdzv_backend=rdzv_backend,
        mounts=specs.parse_mounts(mounts) if mounts else [],
        python=python,
        tee=tee,
    )
