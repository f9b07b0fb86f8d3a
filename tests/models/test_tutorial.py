"""Checkpoints as the published tutorial's script writes them, made with transformers itself."""

import pickle
import re

import pytest
import torch
import transformers

from trn_dist.errors import ConfigError, DataError
from trn_dist.models.bert import (
    BertConfig,
    config_to_huggingface,
    find_tutorial_checkpoint,
    from_huggingface,
    read_tutorial_checkpoint,
)

CONFIG = BertConfig.named("debug", vocab_size=101)


@pytest.fixture
def theirs():
    torch.manual_seed(1)
    fields = {k: v for k, v in config_to_huggingface(CONFIG).items() if k not in ("model_type", "architectures")}
    return transformers.BertForPreTraining(transformers.BertConfig(**fields))


def save(path, model, rename=lambda name: name):
    """The keys that the tutorial's script puts into its file."""
    weights = {rename(name): value for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    content = {"model": weights, "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**content, "files": [3, "a.hdf5", "b.hdf5"], "epoch": 2}, path)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: "module." + name,
        lambda name: re.sub(
            r"LayerNorm\.(weight|bias)", lambda m: f"LayerNorm.{'gamma' if m[1] == 'weight' else 'beta'}", name
        ),
        lambda name: re.sub(r"(intermediate|pooler|transform)\.dense\.", r"\1.dense_act.", name),
    ],
    ids=["Hugging Face", "wrapped", "old layer norm", "NVIDIA"],
)
def test_weights_come_out_as_they_went_in(tmp_path, theirs, rename):
    save(tmp_path / "ckpt_28125.pt", theirs, rename)
    read = read_tutorial_checkpoint(tmp_path / "ckpt_28125.pt", CONFIG)
    expected = from_huggingface(theirs.state_dict(), CONFIG)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_the_newest_of_a_folder_or_the_one_of_a_step(tmp_path):
    assert find_tutorial_checkpoint(tmp_path) is None
    for name in ("ckpt_90.pt", "ckpt_200.pt", "ckpt_x.pt", "step_00000300"):
        (tmp_path / name).touch()
    assert find_tutorial_checkpoint(tmp_path).name == "ckpt_200.pt"
    assert find_tutorial_checkpoint(tmp_path, 90).name == "ckpt_90.pt"
    assert find_tutorial_checkpoint(tmp_path, 91) is None
    assert find_tutorial_checkpoint(tmp_path / "ckpt_90.pt").name == "ckpt_90.pt"


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('the file ran its code')",))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # of a file that torch.save would not write
def test_code_in_a_file_is_not_run(tmp_path):
    torch.save({"model": {}, "extra": Bomb()}, tmp_path / "ckpt_1.pt")
    with pytest.raises(DataError, match=r"ckpt_1\.pt holds more than tensors and plain values"):
        read_tutorial_checkpoint(tmp_path / "ckpt_1.pt", CONFIG)
    (tmp_path / "ckpt_2.pt").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match=r"ckpt_2\.pt"):
        read_tutorial_checkpoint(tmp_path / "ckpt_2.pt", CONFIG)


def test_files_that_are_no_such_checkpoint_are_named(tmp_path, theirs):
    save(tmp_path / "whole.pt", theirs)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:-2000])
    (tmp_path / "empty.pt").touch()
    torch.save([1, 2], tmp_path / "list.pt")
    for name in ("cut", "empty", "list", "missing"):
        with pytest.raises(DataError, match=rf"{name}\.pt"):
            read_tutorial_checkpoint(tmp_path / f"{name}.pt", CONFIG)
    with pytest.raises(ConfigError, match=r"whole\.pt: "):
        read_tutorial_checkpoint(tmp_path / "whole.pt", BertConfig.named("tiny", vocab_size=101))
