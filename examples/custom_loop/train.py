"""A training loop of one's own, for a model that is not BERT: a small network that continues Python source code.

    torchrun --nproc_per_node 2 examples/custom_loop/train.py out

Data-parallel on Trainium, CPU XLA or plain CPU; exact resume after any kind of end; metrics; an error for a recompile,
for a hang, and for ranks that disagree. `main` is the whole loop; change whatever you like.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

from trn_dist import xla
from trn_dist.errors import exit_code_of
from trn_dist.training import (
    AdamW,
    CheckpointStore,
    Precision,
    RunLog,
    StopRequest,
    TrainingState,
    TrainStep,
    Watchdog,
    linear_warmup_linear_decay,
)
from trn_dist.xla.process import code_fingerprint

CONTEXT, BATCH, STEPS, SAVE_EVERY = 32, 64, 200, 50
TEXT = np.frombuffer(Path(argparse.__file__).read_bytes(), dtype=np.uint8)


class Continuation(torch.nn.Module):
    """Predicts each byte from those before it: a causal convolution, then a layer on each position."""

    def __init__(self, width=96):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.mix = torch.nn.Conv1d(width, width, kernel_size=8)
        self.head = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(width, 256))

    def forward(self, tokens):
        """Returns the logits of the next byte, [batch, context, 256], for tokens [batch, context]."""
        x = self.embedding(tokens).transpose(1, 2)
        return self.head(self.mix(torch.nn.functional.pad(x, (7, 0))).transpose(1, 2))


def batch_of(step, rank):
    """A function of the step and the rank alone: that is what makes a resume exact."""
    places = np.random.default_rng((step, rank)).integers(len(TEXT) - CONTEXT, size=BATCH)
    windows = TEXT[places[:, None] + np.arange(CONTEXT + 1)].astype(np.int64)
    return {"tokens": torch.from_numpy(windows[:, :-1]), "next": torch.from_numpy(windows[:, 1:])}


def main(out, device="cpu-xla", steps=STEPS):
    with xla.init(device) as world, StopRequest() as stop:
        torch.manual_seed(0)
        model = Continuation().to(world.device)
        optimizer = AdamW(model.named_parameters())
        state = TrainingState(world, model, optimizer, identity={"global_batch": BATCH * world.size})
        store = CheckpointStore(out / "checkpoints", keep=2, keep_best=True)
        state.resume(store)
        if state.step >= steps:
            return world.print(f"nothing to do: {store.path(state.step)} is of step {state.step}")
        world.require_equal(code=code_fingerprint(), weights=state.fingerprint(), step=state.step)

        def loss(batch):
            return torch.nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["next"].flatten())

        schedule = linear_warmup_linear_decay(3e-3, 20, STEPS + 1)
        step = TrainStep(world, loss, optimizer, schedule, precision=Precision.named("fp32"))
        log = RunLog.in_directory(
            out, world, global_batch=BATCH * world.size, start=state.step, stop=steps, restored=state.restored_seconds
        )
        with log, Watchdog(world, log.clock, out / "stacks"):
            for batch in log.waiting_for_input(batch_of(i, world.rank) for i in range(state.step, steps)):
                log.record(state.step, step(state.step, [batch]))
                state.step += 1
                leaving = stop.requested and world.rank == 0
                if leaving or state.step % SAVE_EVERY == 0 or state.step == steps:
                    log.deliver()
                    with log.saving():
                        state.save(store, score=log.loss_since_save())
                if leaving:
                    break
            with log.saving():
                store.wait()
        world.print(str(log.summary(state.step - 1)))
        return 143 if leaving else None


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(Path(sys.argv[1]), *sys.argv[2:3])))
