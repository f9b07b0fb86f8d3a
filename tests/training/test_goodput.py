import json
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trn_dist.errors import ConfigError, DataError
from trn_dist.training import Utilization, peak_flops
from trn_dist.training.goodput import Ledger, goodput, launched


def seconds(step, start=10.0, input=1.0):
    return {
        "start": start,
        "rendezvous": 2.0,
        "compile": 3.0,
        "input": input,
        "step": step,
        "checkpoint": 4.0,
        "log": 0.0,
    }


def test_work_that_is_done_again_was_lost(tmp_path):
    """Ten steps, killed; resumed from a checkpoint of step 6, after a minute in which nobody ran."""
    first = Ledger(tmp_path / "goodput.json", first_step=0, started=1000.0)
    first.update(steps=10, seconds=seconds(step=100.0), now=1120.0)
    second = Ledger(tmp_path / "goodput.json", first_step=6, started=1180.0)
    second.update(steps=4, seconds=seconds(step=40.0), now=1240.0)
    assert second.totals() == pytest.approx(
        {
            "start": 20.0,
            "rendezvous": 4.0,
            "compile": 6.0,
            "input": 0.6 + 1.0,
            "step": 60.0 + 40.0,
            "checkpoint": 0.6 * 4.0 + 4.0,
            "log": 0.0,
            "other": 0.0,
            "lost": 0.4 * (100.0 + 1.0 + 4.0),
            "down": 60.0,
        }
    )
    assert second.time_to_train() == 240.0
    assert goodput(second.totals()) == pytest.approx(100.0 / 240.0)


def test_a_training_that_starts_anew_has_lost_all_before(tmp_path):
    first = Ledger(tmp_path / "goodput.json", first_step=0, started=0.0)
    first.update(steps=5, seconds=seconds(step=50.0), now=70.0)
    second = Ledger(tmp_path / "goodput.json", first_step=0, started=70.0)
    assert second.totals()["step"] == 0.0
    assert second.totals()["lost"] == 55.0


@given(
    st.lists(st.tuples(st.integers(0, 30), st.floats(0.0, 1e4), st.floats(0.0, 1.0)), min_size=1, max_size=6),
)
def test_no_second_and_no_step_is_counted_twice_or_forgotten(tmp_path_factory, runs):
    """Each run goes on from anywhere in what is done so far."""
    path = tmp_path_factory.mktemp("ledger") / "goodput.json"
    done, spent = 0, 0.0
    for steps, taken, back in runs:
        ledger = Ledger(path, first_step=int(done * back), started=spent)
        spent += 20.0 + taken
        ledger.update(steps=steps, seconds=seconds(step=taken), now=spent)
        done = int(done * back) + steps
    assert sum(run.steps for run in ledger.runs) == done
    assert sum(ledger.totals().values()) == pytest.approx(spent)
    assert json.loads(path.read_text())["runs"][-1]["steps"] == runs[-1][0]


@pytest.mark.parametrize("text", ["", "{}", '{"runs": [{"steps": 1}]}', '{"runs": 3}'])
def test_another_file_in_its_place_is_refused(tmp_path, text):
    (tmp_path / "goodput.json").write_text(text)
    with pytest.raises(DataError, match=r"goodput\.json is no account of runs"):
        Ledger(tmp_path / "goodput.json", first_step=0, started=0.0)


def test_when_this_process_was_launched():
    began, waited = launched({})
    assert time.time() - began == pytest.approx(float(_elapsed(os.getpid())), abs=2.0)
    assert waited == 0.0


def test_under_torchelastic_the_job_begins_with_the_agent():
    environment = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
    began, waited = launched(environment)
    assert time.time() - began == pytest.approx(float(_elapsed(os.getppid())), abs=2.0)
    assert waited == pytest.approx(float(_elapsed(os.getppid())) - float(_elapsed(os.getpid())), abs=2.0)
    assert launched({**environment, "TORCHELASTIC_RESTART_COUNT": "1"})[1] == 0.0


def _elapsed(process):
    """Seconds since a process started, as ps counts them."""
    command = ["ps", "-o", "etimes=", "-p", str(process)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_utilization_and_the_peaks_it_is_compared_with():
    # BERT-Large, sequence length 128, by the published estimate 12*L*H*S*(6*H+S), at 3,500 sequences/s on 64 workers.
    flops = 12 * 24 * 1024 * 128 * (6 * 1024 + 128)
    used = Utilization(flops, peak_flops("trn1.32xlarge", "bf16")).of(3500.0, 64)
    assert used == pytest.approx(flops * 3500 / (2 * 3040e12))
    assert peak_flops("trn1n.32xlarge", "fp32") * 32 == pytest.approx(760e12)
    assert peak_flops("trn2u.48xlarge", "bf16") == peak_flops("trn2", "bf16") == pytest.approx(667e12 / 4)


@pytest.mark.parametrize(("machine", "dtype"), [("p5.48xlarge", "bf16"), ("trn2", "fp32"), ("", "bf16")])
def test_peaks_that_nobody_published_are_refused(machine, dtype):
    with pytest.raises(ConfigError, match="is not in the table .*trn1: bf16, fp32; trn2: bf16.*give the number"):
        peak_flops(machine, dtype)


def test_the_module_runs_without_proc(monkeypatch):
    program = (
        "import pathlib; real = pathlib.Path.read_text\n"
        "def fail(self, *a, **k):\n"
        "    if str(self).startswith('/proc'): raise FileNotFoundError(str(self))\n"
        "    return real(self, *a, **k)\n"
        "pathlib.Path.read_text = fail\n"
        "import time; from trn_dist.training.goodput import launched\n"
        "began, waited = launched({}); assert abs(time.time() - began) < 1 and waited == 0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
