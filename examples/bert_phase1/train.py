"""BERT phase-1 pre-training, data-parallel over the processes of a torchrun job.

The reference run is 64 workers on two trn1.32xlarge; the same script trains a small model on a laptop. `arguments.py`
has the flags, docs/bert.md what became of each flag of the published tutorial's script.
"""

import os
import sys
from dataclasses import asdict
from math import inf
from pathlib import Path

from arguments import choose_precision, choose_utilization, parse_arguments

from trn_dist import __version__, xla
from trn_dist.data.loader import PREDICTIONS_PER_BATCH, BatchLoader, BatchShape
from trn_dist.data.shards import ShardSet
from trn_dist.errors import CheckpointError, ConfigError, TrnDistError, exit_code_of
from trn_dist.models.bert import (
    BertConfig,
    BertForPreTraining,
    find_tutorial_checkpoint,
    pretraining_losses,
    read_tutorial_checkpoint,
)
from trn_dist.training import (
    AdamW,
    CheckpointStore,
    Lamb,
    RunLog,
    TrainingState,
    TrainStep,
    Watchdog,
    fit,
    linear_warmup_linear_decay,
)
from trn_dist.xla.process import code_fingerprint
from trn_dist.xla.profiling import StepProfile, neuron_profile_environment

OPTIMIZERS = {"AdamW": AdamW, "AdamW_FP32OptimParams": AdamW, "AdamW_FP32ParamsCopy": AdamW, "LAMB": Lamb}


def open_shards(args):
    shards = ShardSet.open(Path(args.data_dir).expanduser())
    asked = {"seq_len": (args.seq_len, shards.seq_len), "max_pred_len": (args.max_pred_len, shards.max_predictions)}
    for flag, (wanted, found) in asked.items():
        if wanted not in (None, found):
            raise ConfigError(f"--{flag} {wanted} was asked for, but the shards in {args.data_dir} have {found}")
    return shards


def resume(args, config, state, store):
    """Goes on from output_dir, else from the checkpoints that were named, else starts anew; returns from where."""
    step = args.resume_step if args.resume_step >= 0 else None
    may_change = {"global_batch"} if args.allow_new_global_batch else ()
    if state.resume(store, step=step if store.steps() else None, may_change=may_change):
        return store.path(state.step)
    if not args.resume_ckpt_path:
        if args.resume_ckpt:
            raise CheckpointError(f"there is no checkpoint to resume from in {store.directory}")
        return None
    path = Path(args.resume_ckpt_path)
    named, tutorials = CheckpointStore(path), find_tutorial_checkpoint(path, step)
    if args.phase2:
        state.load_weights(read_tutorial_checkpoint(tutorials, config) if tutorials else named, step=step)
        return None
    if tutorials:
        raise ConfigError(f"{tutorials} does not say enough to go on exactly; --phase2 takes its weights alone")
    if not state.resume(named, step=step, may_change=may_change):
        raise CheckpointError(f"there is no checkpoint to resume from in {path}")
    return named.path(state.step)


def train(args):
    precision = choose_precision(args)
    output = Path(args.output_dir).expanduser()
    device = xla.resolve_device(args.device)
    if device == "neuron":
        os.environ.update(precision.neuron_environment(os.environ))
        if args.profile_steps:
            os.environ.update(neuron_profile_environment(os.environ, output / "profiles"))
    with xla.init(device) as world:
        shards = open_shards(args)
        changes = {"dropout": 0.0, "attention_dropout": 0.0} if args.disable_dropout else {}
        if shards.vocab_size:
            changes["vocab_size"] = shards.vocab_size
        size = "debug" if args.debug else args.model
        config = BertConfig.named(size, **changes)
        model = BertForPreTraining(config, seed=args.seed).to(precision.weights).to(world.device)
        optimizer = OPTIMIZERS[args.optimizer](
            model.named_parameters(),
            master_weights=precision.master_weights,
            # NeuronCores round in hardware; elsewhere the optimizer does it.
            stochastic_rounding=precision.stochastic_rounding and world.kind != "neuron",
        )

        def loss(batch):
            inputs = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions")
            logits = model(*(batch[name] for name in inputs))
            losses = pretraining_losses(logits, batch["masked_lm_ids"], batch["next_sentence_labels"])
            return losses.masked_lm_sum / batch[PREDICTIONS_PER_BATCH] + losses.next_sentence_sum / args.batch_size

        shape = BatchShape(args.batch_size, args.grad_accum_usteps, world.rank, world.size)
        identity = {
            "model": asdict(config),
            "optimizer": args.optimizer,
            "precision": precision.name,
            "seed": args.seed,
            "global_batch": shape.global_batch,
            "data": shards.fingerprint,
        }
        state = TrainingState(world, model, optimizer, identity)
        store = CheckpointStore(output / "checkpoints", keep=args.num_ckpts_to_keep, keep_best=args.keep_best_ckpt)
        resumed_from = resume(args, config, state, store)
        world.require_equal(
            version=__version__, code=code_fingerprint(), **(vars(args) | identity), weights=state.fingerprint()
        )

        loader = BatchLoader(
            shards, shape, seed=args.seed, vocab_size=config.vocab_size, sample_offset=state.sample_offset
        )
        start = state.step
        stop = args.max_steps if args.steps_this_run < 0 else min(args.max_steps, start + args.steps_this_run)
        world.print(
            f"BERT {size}, {config.num_parameters / 1e6:.1f} M parameters, {precision.name}, on {world.kind}: "
            f"{world.size} workers, global batch {shape.global_batch:,}, {shards.num_samples:,} sequences\n"
            + (f"resumed from {resumed_from} after step {start}" if resumed_from else "starting from new weights")
        )
        if start >= stop:
            return world.print(f"nothing to do: the run is at step {start} and ends at step {stop}")

        schedule = linear_warmup_linear_decay(args.lr, args.warmup_steps, args.max_steps)
        train_step = TrainStep(
            world,
            loss,
            optimizer,
            schedule,
            accumulation=args.grad_accum_usteps,
            precision=precision,
            seed=args.seed,
            new_graphs=args.new_graphs,
        )
        log = RunLog.in_directory(
            output,
            world,
            global_batch=shape.global_batch,
            start=start,
            stop=stop,
            log_every=args.log_every,
            print_gradient_norm=args.print_grad_norm,
            utilization=choose_utilization(args, config, precision, shards),
            restored=state.restored_seconds,
        )
        watchdog = Watchdog(world, log.clock, output / "stacks", minimum=args.hang_timeout or inf)
        profile = StepProfile(world, output / "profiles", args.profile_steps)
        with log, watchdog, profile:
            batches = loader.steps(start, stop)
            fit(train_step, state, batches, log, store, save_every=args.steps_per_ckpt, profile=profile)
        summary = log.summary(state.step - 1)
        if world.rank == 0:
            summary.write(output / args.metrics_file)
        world.print(
            f"{summary}\n"
            f"checkpoint   {store.path(state.step)}\n"
            f"metrics      {output / 'metrics.jsonl'}, {output / args.metrics_file}\n"
            f"TensorBoard  {sys.executable} -m tensorboard.main --logdir {output / 'tensorboard'}"
        )
        world.barrier()
        if summary.average_throughput < 0.95 * args.expected_average_throughput:
            raise TrnDistError(
                f"{summary.average_throughput:,.1f} sequences/s on average, below 95 % of "
                f"--expected_average_throughput {args.expected_average_throughput:,.1f}"
            )


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: train(parse_arguments())))
