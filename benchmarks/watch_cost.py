"""What the graph guard, the log, the metrics and the watchdog add to a training step, in one run.

python benchmarks/watch_cost.py [SIZE]      (SIZE: tiny, mini, small, base or large)

A step of BERT takes a tenth longer or shorter from one time to the next, so their cost cannot be seen in a difference
of steps. It is timed by itself: the whole of a guarded, logged and watched step, less the bare step inside it.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import trn_dist.xla as xla
from trn_dist.models.bert import BertConfig, BertForPreTraining, pretraining_losses
from trn_dist.training import AdamW, Precision, RunLog, TrainStep, Watchdog, linear_warmup_linear_decay

STEPS, NOT_COUNTED, BATCH, SEQ_LEN, PREDICTIONS = 40, 12, 8, 128, 20  # the guard compares the first ten steps


def make_batch(vocab_size: int) -> dict[str, torch.Tensor]:
    ones = torch.ones(BATCH, SEQ_LEN, dtype=torch.long)
    return {
        "input_ids": torch.randint(0, vocab_size, (BATCH, SEQ_LEN)),
        "input_mask": ones,
        "segment_ids": 0 * ones,
        "masked_lm_positions": torch.randint(0, SEQ_LEN, (BATCH, PREDICTIONS)),
        "masked_lm_ids": torch.randint(1, vocab_size, (BATCH, PREDICTIONS)),
        "next_sentence_labels": torch.zeros(BATCH, dtype=torch.long),
    }


def main() -> None:
    size = sys.argv[1] if len(sys.argv) > 1 else "mini"
    with xla.init("cpu-xla") as world, tempfile.TemporaryDirectory() as folder:
        config = BertConfig.named(size)
        model = BertForPreTraining(config).to(world.device)

        def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            names = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions")
            logits = model(*(batch[name] for name in names))
            losses = pretraining_losses(logits, batch["masked_lm_ids"], batch["next_sentence_labels"])
            return losses.masked_lm_sum / (BATCH * PREDICTIONS) + losses.next_sentence_sum / BATCH

        schedule = linear_warmup_linear_decay(1e-4, 5, 1000)
        step = TrainStep(world, loss, AdamW(model.named_parameters()), schedule, precision=Precision.named("fp32"))
        bare: list[float] = []
        take = step.guard.function

        def timed(index: int, batches: list[dict[str, torch.Tensor]]) -> object:
            begin = time.perf_counter()
            result = take(index, batches)
            world.sync(wait=True)  # or what the device still has to do would be counted as the guard's
            bare.append(time.perf_counter() - begin)
            return result

        step.guard = xla.GraphGuard(world, timed)
        log = RunLog.in_directory(Path(folder), world, global_batch=BATCH, start=0, stop=STEPS)
        watchdog = Watchdog(world, log.clock, Path(folder) / "stacks")
        batch, whole, looks = make_batch(config.vocab_size), [], []
        with log, watchdog:
            begin = time.perf_counter()
            for index in range(STEPS):
                for _ in log.waiting_for_input([None]):
                    log.record(index, step(index, [batch]))
                whole.append(time.perf_counter() - begin)
                begin = time.perf_counter()
            for _ in range(100):
                begin = time.perf_counter()
                watchdog.look()
                looks.append(time.perf_counter() - begin)
        bare, whole = bare[NOT_COUNTED:], whole[NOT_COUNTED:]
        usual = statistics.median(bare)
        added = statistics.mean(
            w - b for w, b in zip(whole, bare, strict=True)
        )  # the mean: a log line comes once in ten
        watching = statistics.median(looks) / watchdog.every
        print(
            f"BERT-{size}, batch {BATCH}: a step of {usual * 1e3:.0f} ms, guard and log and metrics add "
            f"{added * 1e3:.2f} ms, the watchdog takes {watching:.6f} of a core: ratio {added / usual + watching:.4f}"
        )


if __name__ == "__main__":
    main()
