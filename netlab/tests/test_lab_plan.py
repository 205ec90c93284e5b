import pytest

from distlion.errors import InvalidArgumentError
from distlion_netlab import LabPlan


def test_names_carry_the_lab_and_the_host():
    plan = LabPlan("abc", 2)
    assert plan.namespaces == ("distlion-abc-bridge", "distlion-abc-h0", "distlion-abc-h1")


def test_addresses_begin_with_1():
    assert [LabPlan("abc", 250).address(host) for host in (0, 249)] == ["10.77.0.1", "10.77.0.250"]


@pytest.mark.parametrize("name", ["", "-a", "A", "a/b", "a b", "../x", "a" * 33, "*"])
def test_name_that_could_not_be_a_namespace_is_an_error(name):
    with pytest.raises(InvalidArgumentError, match="name '"):
        LabPlan(name, 2)


@pytest.mark.parametrize("n_hosts", [0, -1, 251])
def test_number_of_hosts_must_fit_the_addresses(n_hosts):
    with pytest.raises(InvalidArgumentError, match="expected 1 to 250"):
        LabPlan("abc", n_hosts)
