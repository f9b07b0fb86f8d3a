"""The flags of the BERT pre-training script: those of the published tutorial, by their names and defaults."""

import argparse

from trn_dist.errors import ConfigError
from trn_dist.training import Precision, Utilization, peak_flops
from trn_dist.xla import DEVICES
from trn_dist.xla.profiling import parse_steps


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description="BERT phase-1 pre-training.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data_dir", default="~/examples_datasets/bert_pretrain_wikicorpus_tokenized_hdf5_seqlen128/", help="shards")
    add("--output_dir", default="./output", help="checkpoints, metrics and TensorBoard events")
    add("--metrics_file", default="results.json", help="summary of the run, in output_dir")
    add("--device", default="auto", choices=DEVICES)
    add("--model", default="large", help="tiny, mini, small, base or large")
    add("--debug", action="store_true", help="a model of one small layer")
    add(
        "--optimizer",
        default="AdamW_FP32OptimParams",
        choices=("AdamW", "AdamW_FP32OptimParams", "AdamW_FP32ParamsCopy", "LAMB"),
    )
    add("--enable_fp32", action="store_true", help="fp32 throughout; else bf16 weights with stochastic rounding")
    add("--enable_pt_autocast", action="store_true", help="fp32 weights, bf16 forward pass")
    add("--batch_size", type=int, default=8, help="sequences in a micro-batch of one worker")
    add("--grad_accum_usteps", type=int, default=64, help="micro-batches a step")
    add("--lr", type=float, default=4e-4, help="peak learning rate")
    add("--warmup_steps", type=int, default=2000)
    add("--max_steps", type=int, default=28125, help="horizon of the learning-rate schedule")
    add("--steps_this_run", type=int, default=-1, help="steps that this run takes; -1: up to max_steps")
    add("--seed", type=int, default=12349)
    add("--seq_len", type=int, help="if given, the shards must have it")
    add("--max_pred_len", type=int, default=20, help="the shards must have it")
    add("--disable_dropout", action="store_true")
    add("--steps_per_ckpt", type=int, default=200, help="steps between checkpoints; there is always one at the end")
    add("--num_ckpts_to_keep", type=int, default=1, help="-1: all")
    add("--keep_best_ckpt", action="store_true", help="keep the checkpoint with the lowest mean loss beside them")
    add(
        "--allow_new_global_batch",
        action="store_true",
        help="resume with another global batch, from the next sample on",
    )
    add("--resume_ckpt", action="store_true", help="fail when there is nothing to resume from")
    add("--resume_ckpt_path", help="folder of checkpoints to start from when output_dir has none")
    add("--resume_step", type=int, default=-1, help="step to resume from; -1: the newest")
    add("--phase2", action="store_true", help="take the weights alone from --resume_ckpt_path and start at step 0")
    add("--log_every", type=int, default=10, help="steps between progress lines")
    add("--new_graphs", default="raise", choices=("raise", "warn", "allow"), help="what a recompile after step 2 does")
    add("--machine", help="such as trn1.32xlarge: its peak is what model FLOPs utilization is measured against")
    add("--peak_tflops", type=float, help="the peak of one worker, where the machine is not known by name")
    add("--hang_timeout", type=float, default=600.0, help="seconds that a step may always take; 0: no watchdog")
    add(
        "--profile_steps",
        type=parse_steps,
        default=range(0),
        metavar="A:B",
        help="profile step A up to, not including, B",
    )
    add("--print_grad_norm", action="store_true")
    add("--expected_average_throughput", type=float, default=0.0, help="fail below 95 %% of so many sequences/s")
    return parser.parse_args(argv)


def choose_precision(args):
    if args.enable_fp32 and args.enable_pt_autocast:
        raise ConfigError("--enable_fp32 and --enable_pt_autocast contradict each other: choose one")
    if args.enable_fp32 or args.enable_pt_autocast:
        return Precision.named("fp32" if args.enable_fp32 else "autocast")
    return Precision.named("bf16-master" if args.optimizer == "AdamW_FP32ParamsCopy" else "bf16")


def choose_utilization(args, config, precision, shards):
    """What the run's speed is compared with; None where nobody said what the hardware can do."""
    if args.peak_tflops is None and args.machine is None:
        return None
    dtype = "fp32" if precision.name == "fp32" else "bf16"
    peak = args.peak_tflops * 1e12 if args.peak_tflops is not None else peak_flops(args.machine, dtype)
    if peak <= 0:
        raise ConfigError(f"--peak_tflops must be positive, not {args.peak_tflops:g}")
    return Utilization(config.flops_per_sequence(shards.seq_len, shards.max_predictions), peak)
