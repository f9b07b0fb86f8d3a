import sys
from string import Template

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trn_dist.launcher.app as app
from trn_dist.components import ddp
from trn_dist.errors import ConfigError
from trn_dist.launcher.macros import keep_dollars


@pytest.mark.parametrize(
    ("text", "layout", "nnodes"),
    [
        ("2", (None, 1, 2), "1"),
        ("1x2", (None, 1, 2), "1"),
        ("2x32", (None, 2, 32), "2"),
        ("2:4x32", (2, 4, 32), "2:4"),
    ],
)
def test_layouts(text, layout, nnodes):
    found = app.Layout.parse(text)
    assert (found.min_nodes, found.nodes, found.processes) == layout
    assert found.nnodes == nnodes


@pytest.mark.parametrize("text", ["", "x2", "2x", "1:2", "axb", "2:x3", "-1x2", "1x2x3", " 1x2"])
def test_layouts_of_another_form(text):
    with pytest.raises(ConfigError, match="is not of the form"):
        app.Layout.parse(text)


@pytest.mark.parametrize("text", ["0", "0x2", "2x0", "3:2x1", "0:2x1"])
def test_layouts_that_cannot_be(text):
    with pytest.raises(ConfigError, match="each must be at least 1"):
        app.Layout.parse(text)


# The first block is torchx's own grammar, from the examples of its documentation.
@pytest.mark.parametrize(
    ("text", "environment"),
    [
        ("", {}),
        ("FOO=v1", {"FOO": "v1"}),
        ("FOO=''", {"FOO": ""}),
        ('FOO=""', {"FOO": ""}),
        ("FOO=v1,v2", {"FOO": "v1,v2"}),
        ("FOO=v1;v2", {"FOO": "v1;v2"}),
        ("FOO=v1,v2,BAR=v3", {"FOO": "v1,v2", "BAR": "v3"}),
        ("FOO=v1;v2,BAR=v3", {"FOO": "v1;v2", "BAR": "v3"}),
        ("FOO=v1;v2;BAR=v3", {"FOO": "v1;v2", "BAR": "v3"}),
        ("FLAGS=--model-type=transformer -O1,A=b", {"FLAGS": "--model-type=transformer -O1", "A": "b"}),
        ("A=b=c", {"A": "b=c"}),
        ("A='x=1,B=2',C=3", {"A": "x=1,B=2", "C": "3"}),
        ('A="it\'s",B=1', {"A": "it's", "B": "1"}),
        ("A=--x='1 2' y", {"A": "--x=1 2 y"}),
        ("A= b , C=d", {"A": "b", "C": "d"}),
        ("A=it's,B=don't", {"A": "it's", "B": "don't"}),
    ],
)
def test_environments(text, environment):
    assert app.parse_environment(text) == environment


@settings(deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True),
        st.text(st.characters(exclude_characters="'\"", exclude_categories=["Cs"])),
        max_size=4,
    )
)
def test_quoted_values_come_back_as_they_are(environment):
    assert app.parse_environment(",".join(f"{name}='{value}'" for name, value in environment.items())) == environment


@pytest.mark.parametrize("text", ["A", "=b", "1A=b", "x,A=b", ",A=b"])
def test_environments_of_another_form(text):
    with pytest.raises(ConfigError, match="is not of the form NAME=VALUE,NAME=VALUE"):
        app.parse_environment(text)


def test_a_mapping_is_copied():
    given = {"A": "b"}
    found = app.parse_environment(given)
    assert found == given
    assert found is not given


def test_environment_file(tmp_path):
    path = tmp_path / "job.env"
    path.write_text("\ufeff# for the compiler\n\nNEURON_CC_FLAGS=--a=b --c='d, e'\n EMPTY =\n")
    assert app.read_environment_file(str(path)) == {"NEURON_CC_FLAGS": "--a=b --c='d, e'", "EMPTY": ""}


@pytest.mark.parametrize("line", ["novalue", "=x", "1A=b", "A B=c"])
def test_environment_file_names_the_line(tmp_path, line):
    path = tmp_path / "job.env"
    path.write_text(f"A=b\n{line}\n")
    with pytest.raises(ConfigError, match=rf"job\.env, line 2: '{line}' is not of the form NAME=VALUE"):
        app.read_environment_file(str(path))


def test_environment_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"environment file .*nowhere\.env cannot be read"):
        app.read_environment_file(str(tmp_path / "nowhere.env"))


def test_precedence_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("LOGLEVEL", raising=False)
    path = tmp_path / "job.env"
    path.write_text("A=file\nB=file\nXLA_IR_DEBUG=0\n")
    found = app.make_environment("B=flag", str(path), debug=True)
    assert (found["A"], found["B"]) == ("file", "flag")
    assert found["XLA_IR_DEBUG"] == "0"  # the user's value stands against --debug
    assert found["XLA_HLO_DEBUG"] == "1"
    assert found["LOGLEVEL"] == "WARNING"


@pytest.mark.parametrize(
    ("name", "experiment", "run"),
    [("/", "default-experiment", "train"), ("e/r", "e", "r"), ("e/", "e", "train"), ("/r", "default-experiment", "r")],
)
def test_names(name, experiment, run):
    assert app.split_name(name, "a/train.py", None) == (experiment, run)
    assert app.split_name("r", None, "a.b")[1] == "r"
    with pytest.raises(ConfigError, match="is not of the form EXPERIMENT/RUN"):
        app.split_name("a/b/c", "x.py", None)


@pytest.mark.parametrize(
    ("script", "module", "role"),
    [("a/train-Llama_3.py", None, "train_llama_3"), (None, "pkg.sub.run", "run"), ("---.py", None, "worker")],
)
def test_role_names_hold_nothing_that_breaks_a_variable(script, module, role):
    assert app.role_name(script, module) == role


@settings(deadline=None)
@given(st.text(st.sampled_from("$ab{}_ "), max_size=12))
def test_text_without_macros_survives_torchx(text):
    """torchx applies string.Template to each argument, with names that the text here does not hold."""
    assert Template(keep_dollars(text)).safe_substitute(app_id="X", replica_id="0") == text


def test_macros_still_work():
    assert Template(keep_dollars("--out=/x/${app_id}")).safe_substitute(app_id="job-1") == "--out=/x/job-1"


def test_one_node_takes_a_free_port_and_this_interpreter():
    made = ddp("--a", "b c", script="examples/train.py", j="1x4", max_retries=2, cpu=3, memMB=5)
    (role,) = made.roles
    assert (made.name, role.name, role.num_replicas, role.min_replicas) == ("train", "train", 1, None)
    assert role.entrypoint == sys.executable
    assert " ".join(role.args) == (
        "-u -m trn_dist.launcher.agent --processes 4 --rdzv_endpoint localhost:0 --rdzv_backend c10d "
        "--rdzv_id ${app_id} --nnodes 1 --max_restarts 0 --tee 3 --role  -- examples/train.py --a b c"
    )
    assert role.args[-2:] == ["--a", "b c"]
    assert (role.resource.cpu, role.resource.memMB, role.max_retries) == (3, 5, 2)
    assert role.env["TORCHX_TRACKING_EXPERIMENT_NAME"] == "default-experiment"


def test_several_nodes_meet_at_the_first():
    (role,) = ddp(m="pkg.train", j="2:4x32", image="repo/image:1", rdzv_backend="static", rdzv_port=1234).roles
    assert (role.num_replicas, role.min_replicas, role.entrypoint) == (4, 2, "python")
    assert " ".join(role.args) == (
        "-u -m trn_dist.launcher.agent --processes 32 --rank0_env ${rank0_env} --rdzv_port 1234 --rdzv_backend static "
        "--rdzv_id ${app_id} --nnodes 2:4 --max_restarts 0 --tee 3 --role  --node_rank ${replica_id} -m -- pkg.train"
    )
    assert role.port_map == {"c10d": 1234}


def test_nothing_that_torch_xla_sets_itself_is_set():
    (role,) = ddp(script="x.py", debug=True).roles
    assert not [
        name for name in role.env if name.startswith(("NEURON_PJRT", "PJRT", "NEURON_RT_ROOT", "NEURON_RT_VIS"))
    ]


@pytest.mark.parametrize("which", [{}, {"script": "x.py", "m": "x"}])
def test_exactly_one_of_script_and_module(which):
    with pytest.raises(ConfigError, match="--script FILE or with -m MODULE: exactly one"):
        ddp(**which)


def test_mounts():
    (role,) = ddp(script="x.py", mounts=["type=bind", "src=/a", "dst=/b", "readonly"]).roles
    (mount,) = role.mounts
    assert (mount.src_path, mount.dst_path, mount.read_only) == ("/a", "/b", True)
