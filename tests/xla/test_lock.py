"""What of a graph's text counts for its hash, and what does not."""

import dataclasses
import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trn_dist.errors import ConfigError, DataError
from trn_dist.xla.lock import Graph, Key, Lock, compare

TEXT = """\
HloModule IrToHlo.13, entry_computation_layout={(f32[4]{0}, f32[3,4]{1,0})->(f32[3]{0}, f32[])}

%AddComputation.5 (x.6: f32[], y.7: f32[]) -> f32[] {
  %x.6 = f32[] parameter(0)
  %y.7 = f32[] parameter(1)
  ROOT %add.8 = f32[] add(f32[] %x.6, f32[] %y.7)
}

ENTRY %IrToHlo.13 (p0.1: f32[4], p1.2: f32[3,4]) -> (f32[3], f32[]) {
  %p0.1 = f32[4]{0} parameter(0)
  %p1.2 = f32[3,4]{1,0} parameter(1)
  %constant.3 = f32[] constant(0)
  %dot.4 = f32[3]{0} dot(f32[3,4]{1,0} %p1.2, f32[4]{0} %p0.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %reduce.9 = f32[] reduce(f32[3]{0} %dot.4, f32[] %constant.3), dimensions={0}, to_apply=%AddComputation.5
  %constant.10 = f32[] constant(0.015625)
  %multiply.11 = f32[] multiply(f32[] %reduce.9, f32[] %constant.10)
  ROOT %tuple.12 = (f32[3]{0}, f32[]) tuple(f32[3]{0} %dot.4, f32[] %multiply.11)
}
"""
BASE = Graph.parse(TEXT)


def test_what_a_graph_is_made_of():
    assert BASE.inputs == {"f32[3,4]": 1, "f32[4]": 1}
    assert BASE.operations == {"constant f32[]": 2, "dot f32[3]": 1, "multiply f32[]": 1, "reduce f32[]": 1}


@given(st.integers(1, 10**6), st.text(alphabet='ab{}"\\ ,=', max_size=12))
def test_numbers_names_comments_and_metadata_do_not_count(shift, note):
    moved = re.sub(r"([A-Za-z]\w*)\.(\d+)", lambda match: f"{match[1]}.{int(match[2]) + shift}", TEXT)
    assert moved != TEXT
    metadata = f', metadata={{op_type="aten__mm" source_file={json.dumps(note)} source_line=3}}'
    told = "\n".join(line + metadata if line.startswith("  ") else line for line in moved.splitlines())
    commented = told.replace(", f32[4]{0} %p0", ", /*index=1*/f32[4]{0} %p0")
    assert Graph.parse(commented) == BASE


@given(st.randoms(use_true_random=False))
def test_the_order_in_which_instructions_are_written_does_not_count(chance: random.Random):
    head, body = TEXT.split("ENTRY")
    first, *lines, last = body.splitlines()
    names = {line: re.search(r"%[\w.]+", line)[0] for line in lines}
    written, waiting = [], lines
    while waiting:
        ready = [line for line in waiting if not any(names[o] in line for o in waiting if o is not line)]
        line = chance.choice(ready)
        written.append(line)
        waiting = [other for other in waiting if other is not line]
    assert Graph.parse(head + "ENTRY" + "\n".join([first, *written, last])) == BASE


def test_a_value_that_is_computed_twice_is_one_that_is_used_twice():
    twice = TEXT.replace(
        "  %constant.10",
        "  %dot.40 = f32[3]{0} dot(f32[3,4]{1,0} %p1.2, f32[4]{0} %p0.1), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={0}\n  %constant.10",
    ).replace("tuple(f32[3]{0} %dot.4,", "tuple(f32[3]{0} %dot.40,")
    assert Graph.parse(twice) == BASE


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("f32[3,4]", "f32[3,5]"),
        ("multiply(", "add("),
        ("constant(0.015625)", "constant(0.03125)"),
        ("dimensions={0}, to_apply", "dimensions={1}, to_apply"),
        ("ROOT %add.8 = f32[] add(", "ROOT %add.8 = f32[] maximum("),
        ("multiply(f32[] %reduce.9, f32[] %constant.10)", "multiply(f32[] %reduce.9, f32[] %reduce.9)"),
        ("%x.6, f32[] %y.7)", "%y.7, f32[] %x.6)"),
    ],
)
def test_what_is_computed_counts(old, new):
    changed = TEXT.replace(old, new)
    assert changed != TEXT
    assert Graph.parse(changed).sha256 != BASE.sha256


def test_two_collectives_are_two():
    reduced = (
        "  %all-reduce.{} = f32[3]{{0}} all-reduce(f32[3]{{0}} %dot.4), replica_groups={{{{0,1}}}}, "
        "to_apply=%AddComputation.5\n"
    )
    body = TEXT.replace("  %constant.10", reduced.format(20) + reduced.format(21) + "  %constant.10")
    one = body.replace("tuple(f32[3]{0} %dot.4,", "tuple(f32[3]{0} %all-reduce.20, f32[3]{0} %all-reduce.20,")
    two = body.replace("tuple(f32[3]{0} %dot.4,", "tuple(f32[3]{0} %all-reduce.20, f32[3]{0} %all-reduce.21,")
    assert Graph.parse(one).operations["all-reduce f32[3]"] == 1
    assert Graph.parse(two).operations["all-reduce f32[3]"] == 2
    assert Graph.parse(two.replace("{{0,1}}", "{{0},{1}}")).sha256 != Graph.parse(two).sha256


@given(st.text())
def test_any_text_is_no_graph_at_worst(text):
    assert Graph.parse(text).operations == {}


KEY = Key("cpu-xla", 2, {"torch": "2.9.1", "torch_xla": "2.9.0"})


def test_a_lock_comes_back(tmp_path):
    lock = Lock(KEY, [BASE])
    lock.write(tmp_path / "graphs.lock")
    assert Lock.read(tmp_path / "graphs.lock") == lock
    assert compare(lock, lock) == []


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 1}', '{"format": 1, "key": {}, "graphs": []}', '{"format": 9}']
)
def test_a_file_that_is_no_lock_is_refused(tmp_path, content):
    (tmp_path / "graphs.lock").write_text(content)
    with pytest.raises(DataError, match=r"graphs\.lock"):
        Lock.read(tmp_path / "graphs.lock")


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("key", "versions", None),
        ("key", "world_size", "2"),
        ("graph", "sha256", [1]),
        ("graph", "inputs", []),
        ("graph", "operations", None),
        ("graph", "operations", {"add f32[]": "many"}),
        ("lock", "graphs", []),
        ("lock", "graphs", {}),
    ],
)
def test_a_lock_that_was_damaged_by_hand_is_refused(tmp_path, where, name, value):
    file = tmp_path / "graphs.lock"
    Lock(KEY, [BASE]).write(file)
    content = json.loads(file.read_text())
    {"lock": content, "key": content["key"], "graph": content["graphs"][0]}[where][name] = value
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"graphs\.lock is no lock of graphs"):
        Lock.read(file)


def test_graphs_of_other_versions_are_not_compared():
    newer = dataclasses.replace(KEY, versions={"torch": "2.9.1", "neuronx-cc": "2.26"})
    with pytest.raises(ConfigError, match=r"\(neuronx-cc absent -> 2\.26, torch_xla 2\.9\.0 -> absent\)"):
        compare(Lock(KEY, [BASE]), Lock(newer, [BASE]))


def test_graphs_that_came_and_went():
    other = Graph("ab", {"f32[1]": 3}, {"add f32[1]": 7})
    assert compare(Lock(KEY, [BASE]), Lock(KEY, [BASE, other])) == ["graph 2 is new: 7 operations on 3 inputs"]
    assert compare(Lock(KEY, [other, BASE]), Lock(KEY, [BASE])) == ["graph 1 is gone: 7 operations on 3 inputs"]
    same = dataclasses.replace(other, sha256="cd")
    assert compare(Lock(KEY, [other]), Lock(KEY, [same]))[1].startswith(
        "  the same operations on the same shapes, with"
    )
