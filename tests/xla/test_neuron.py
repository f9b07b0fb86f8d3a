"""What a NeuronCore would compile, read from the lowered graph; no Trainium device takes part."""

import re

import pytest


def all_reduces(graph):
    """(dtype, elements, replica groups) of each all-reduce."""
    found = re.findall(r"= \(?(\w+)\[(\d*)\].*? all-reduce\(.*?replica_groups=(\{\{.*?\}\})", graph)
    return [(dtype, int(elements), groups) for dtype, elements, groups in found]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_one_all_reduce_a_bucket_over_all_64_ranks_once_a_step(run_world, accumulation):
    run = run_world("lower_neuron_step.py", accumulation, size=1)
    assert run.returncode == 0, run.output
    (graphs,) = run.by_rank
    # A step is one graph; with accumulation each micro-batch is one, and none of them reduces anything.
    assert len(graphs) == (1 if accumulation == 1 else accumulation + 1)
    assert all("all-reduce(" not in graph for graph in graphs[:-1])
    everyone = "{{" + ",".join(map(str, range(64))) + "}}"
    # The last layer's 64*32 + 32 elements with the first one's bias of 64; then its 64*64, and the loss.
    assert all_reduces(graphs[-1]) == [("f32", 2144, everyone), ("f32", 4097, everyone)]
    assert len(re.findall(r"\ball-reduce\(", graphs[-1])) == 2
    assert "constant(0.015625)" in graphs[-1]  # the mean over 64


def test_functional_collectives_over_all_64_ranks(run_world):
    graphs, others = (run_world("lower_neuron_collectives.py", rank, size=1).by_rank[0] for rank in (3, 0))
    everyone = "{{" + ",".join(map(str, range(64))) + "}}"
    assert all_reduces(graphs["reduce_gradients"]) == [("f32", 30, everyone)]
    assert "constant(0.015625)" in graphs["reduce_gradients"]
    assert re.search(r"f32\[4,5\].*? all-reduce\(.*replica_groups=" + re.escape(everyone), graphs["all_reduce"])
    assert re.search(r"f32\[64,4,5\].*? all-gather\(.*replica_groups=" + re.escape(everyone), graphs["all_gather"])
    assert re.search(r"f32\[4,5\].*? all-reduce\(.*replica_groups=" + re.escape(everyone), graphs["broadcast"])
    assert graphs == others  # every rank compiles the same
