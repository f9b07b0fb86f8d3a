"""How long a checkpoint keeps the training waiting, against a blocking torch.save of the same state, in one run.

python benchmarks/checkpoint_block.py [SIZE]      (SIZE: tiny, mini, small, base or large)
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import trn_dist.xla as xla
from trn_dist.models.bert import BertConfig, BertForPreTraining
from trn_dist.training import AdamW, CheckpointStore, TrainingState

ROUNDS = 3


def main() -> None:
    size = sys.argv[1] if len(sys.argv) > 1 else "base"
    with xla.init("cpu-xla") as world, tempfile.TemporaryDirectory() as folder:
        model = BertForPreTraining(BertConfig.named(size)).to(world.device)
        optimizer = AdamW(model.named_parameters())
        state = TrainingState(world, model, optimizer, {})
        store = CheckpointStore(Path(folder) / "checkpoints")
        world.sync(wait=True)
        times: dict[str, list[float]] = {"blocked": [], "whole": [], "torch.save": []}
        for state.step in range(ROUNDS):
            begin = time.perf_counter()
            state.save(store)
            times["blocked"].append(time.perf_counter() - begin)
            store.wait()
            times["whole"].append(time.perf_counter() - begin)

            begin = time.perf_counter()
            everything = {"model": model.state_dict(), "optimizer": optimizer.state_tensors()}
            on_host = {group: {n: t.cpu() for n, t in tensors.items()} for group, tensors in everything.items()}
            torch.save(on_host, Path(folder) / "checkpoint.pt")
            times["torch.save"].append(time.perf_counter() - begin)
        blocked, whole, blocking = (statistics.median(values) for values in times.values())
        print(
            f"BERT-{size}: a checkpoint blocks {blocked * 1e3:.1f} ms (written, hashed and forced to the disk after "
            f"{whole:.1f} s), torch.save {blocking:.1f} s, ratio {blocked / blocking:.4f}"
        )


if __name__ == "__main__":
    main()
