"""Parts of a training loop: precision, optimizers, schedules, the step, the loop, checkpoints and metrics.

Each stands alone; `fit` shows how they fit together and `examples/bert_phase1/train.py` uses them all.
"""

from trn_dist.training.checkpoint import Checkpoint, CheckpointStore
from trn_dist.training.fit import fit
from trn_dist.training.metrics import JsonLines, Sink, TensorBoard
from trn_dist.training.mfu import Utilization, peak_flops
from trn_dist.training.optimizers import AdamW, Lamb, Optimizer
from trn_dist.training.precision import Precision
from trn_dist.training.report import RunLog
from trn_dist.training.schedules import Schedule, linear_warmup_linear_decay, linear_warmup_polynomial_decay
from trn_dist.training.state import TrainingState
from trn_dist.training.step import Batch, StepResult, TrainStep
from trn_dist.training.stop import StopRequest
from trn_dist.training.summary import Summary
from trn_dist.training.watchdog import HANG_EXIT_CODE, Watchdog

__all__ = [
    "HANG_EXIT_CODE",
    "AdamW",
    "Batch",
    "Checkpoint",
    "CheckpointStore",
    "JsonLines",
    "Lamb",
    "Optimizer",
    "Precision",
    "RunLog",
    "Schedule",
    "Sink",
    "StepResult",
    "StopRequest",
    "Summary",
    "TensorBoard",
    "TrainStep",
    "TrainingState",
    "Utilization",
    "Watchdog",
    "fit",
    "linear_warmup_linear_decay",
    "linear_warmup_polynomial_decay",
    "peak_flops",
]
