import pytest

from trn_dist.errors import ConfigError
from trn_dist.xla.place import Place

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_reads_what_torchrun_sets():
    assert Place.from_environment(TORCHRUN) == Place(rank=5, size=8, local_rank=1, local_size=4)


def test_one_process_without_a_launcher():
    assert Place.from_environment({"PATH": "/bin"}) == Place(rank=0, size=1, local_rank=0, local_size=1)


@pytest.mark.parametrize("missing", TORCHRUN)
def test_names_the_variable_that_is_missing(missing):
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(ConfigError, match=rf"but not {missing}: start the script with torchrun"):
        Place.from_environment(environment)


@pytest.mark.parametrize("name", TORCHRUN)
def test_names_the_variable_that_is_no_number(name):
    with pytest.raises(ConfigError, match=f"{name} is 'two', not a whole number"):
        Place.from_environment({**TORCHRUN, name: "two"})


@pytest.mark.parametrize(
    "change", [{"RANK": "8"}, {"RANK": "-1"}, {"LOCAL_RANK": "4"}, {"LOCAL_WORLD_SIZE": "9"}, {"WORLD_SIZE": "0"}]
)
def test_refuses_a_contradiction(change):
    with pytest.raises(ConfigError, match="contradicts itself"):
        Place.from_environment({**TORCHRUN, **change})
