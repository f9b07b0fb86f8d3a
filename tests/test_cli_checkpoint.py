from dataclasses import asdict

import pytest
import torch

from trn_dist.cli import main
from trn_dist.models.bert import BertConfig, BertForPreTraining
from trn_dist.training import CheckpointStore

CONFIG = BertConfig.named("debug", vocab_size=203)


@pytest.fixture
def run_directory(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=-1)
    model = BertForPreTraining(CONFIG, seed=4)
    for step in (5, 10):
        state = {"world_size": 2, "identity": {"model": asdict(CONFIG)}}
        store.save(step, {"model": model.state_dict()}, state)
    return tmp_path


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_ls(run_directory, capsys, below):
    assert main(["checkpoint", "ls", str(run_directory / below)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["step", "5"]
    assert "2 workers" in second
    assert second.endswith("checkpoints/step_00000010")


def test_verify(run_directory, capsys):
    assert main(["checkpoint", "verify", str(run_directory)]) == 0
    path = run_directory / "checkpoints/step_00000005/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(run_directory)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert "DAMAGED" in first
    assert "model.safetensors does not have the sha256 of its manifest" in first
    assert second.endswith("whole")


@pytest.mark.parametrize("options", [[], ["--step", "5"]])
def test_export_is_opened_by_transformers_and_says_the_same(run_directory, tmp_path, options, monkeypatch):
    import transformers

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = tmp_path / "hf"
    assert main(["checkpoint", "export-hf", str(run_directory), str(out), *options]) == 0
    theirs = transformers.BertForPreTraining.from_pretrained(out, attn_implementation="eager").eval()
    ours = BertForPreTraining(CONFIG, seed=4).eval()
    tokens = torch.randint(1, 203, (2, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(16)[None].expand(2, -1)
    with torch.no_grad():
        logits = ours(tokens, torch.ones_like(tokens), torch.zeros_like(tokens), positions)
        reference = theirs(input_ids=tokens)
    torch.testing.assert_close(logits.masked_lm, reference.prediction_logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits.next_sentence, reference.seq_relationship_logits, rtol=0, atol=1e-5)


def test_refusals(run_directory, tmp_path, capsys):
    assert main(["checkpoint", "ls", str(tmp_path / "nowhere")]) == 78
    assert "error: there is no checkpoint in" in capsys.readouterr().err
    assert main(["checkpoint", "export-hf", str(run_directory), str(tmp_path)]) == 78
    assert "exists already: name a folder that does not" in capsys.readouterr().err
    assert main(["checkpoint", "export-hf", str(run_directory), str(tmp_path / "x"), "--step", "7"]) == 1
    assert "step_00000007" in capsys.readouterr().err
    CheckpointStore(tmp_path / "other").save(1, {"model": {"w": torch.ones(1)}}, {"identity": {}, "world_size": 1})
    assert main(["checkpoint", "export-hf", str(tmp_path / "other"), str(tmp_path / "x")]) == 78
    assert "does not say the sizes of a BERT model" in capsys.readouterr().err
