"""Saves, then resumes and counts what each rank reads meanwhile: `resume_reads.py OUT CHECKPOINTS`."""

import json
import sys
from pathlib import Path

import torch

import trn_dist.xla as xla
from trn_dist.training import AdamW, CheckpointStore, TrainingState

out, store = Path(sys.argv[1]), CheckpointStore(Path(sys.argv[2]))


def bytes_read():
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])  # all that read calls returned, from the page cache too


with xla.init("cpu") as world:
    model = torch.nn.Linear(1000, 1000)
    state = TrainingState(world, model, AdamW(model.named_parameters()), {"global_batch": 8})
    state.save(store)
    store.wait()
    world.barrier()
    before = bytes_read()
    state.resume(store)
    size = sum(path.stat().st_size for path in store.path(0).iterdir())
    result = {"read": bytes_read() - before, "bytes": size, "fingerprint": state.fingerprint()}
    world.barrier()
    (out / f"{world.rank}.json").write_text(json.dumps(result))
