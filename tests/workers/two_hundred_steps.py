"""200 steps with all that a real run has: `two_hundred_steps.py OUT`. Notes the graphs compiled after each step."""

import json
import sys
from pathlib import Path

import torch

import trn_dist.xla as xla
from trn_dist.training import (
    AdamW,
    CheckpointStore,
    Precision,
    RunLog,
    TrainingState,
    TrainStep,
    Watchdog,
    fit,
    linear_warmup_linear_decay,
)
from trn_dist.xla.graphs import count_graphs

out = Path(sys.argv[1])
STEPS = 200

with xla.init("cpu-xla") as world:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16)]
    model = torch.nn.Sequential(*layers).to(world.device)
    optimizer = AdamW(model.named_parameters())
    state = TrainingState(world, model, optimizer, {"global_batch": 16})
    step = TrainStep(
        world,
        lambda batch: (model(batch["x"]) - batch["x"]).square().mean(),
        optimizer,
        linear_warmup_linear_decay(1e-2, 20, STEPS),
        accumulation=2,
        max_gradient_norm=0.1,
        precision=Precision.named("fp32"),
    )
    compiled = []

    def counted(index, batches):
        result = step(index, batches)
        compiled.append(count_graphs(world).compiled)
        return result

    def micro_batches():
        for index in range(STEPS):
            generator = torch.Generator().manual_seed(2 * index + world.rank)
            yield [{"x": torch.randn(4, 16, generator=generator).numpy()} for _ in range(2)]

    folder = out / "run"
    store = CheckpointStore(folder / "checkpoints", keep=2, keep_best=True)
    log = RunLog.in_directory(folder, world, global_batch=16, start=0, stop=STEPS, log_every=7)
    with log, Watchdog(world, log.clock, folder / "stacks"):
        fit(counted, state, micro_batches(), log, store, save_every=25)
    world.barrier()
    result = {"compiled": compiled, "at_the_end": count_graphs(world).compiled, "saved": store.steps()}
    (out / f"{world.rank}.json").write_text(json.dumps(result))
