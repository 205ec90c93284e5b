import pytest

from distlion.errors import InvalidArgumentError
from distlion_netlab import DeviceWorkload, GptWorkload, VectorWorkload


def test_a_gpt_is_trained_by_baselines_and_votes():
    GptWorkload().check_methods(["none", "ddp-fp32", "ddp-powersgd", "majority-all-reduce-overlap"])
    GptWorkload().check_methods(["local-8"])


def test_a_gpt_is_not_trained_by_a_bare_all_reduce():
    with pytest.raises(InvalidArgumentError, match="all-reduce-fp32"):
        GptWorkload().check_methods(["all-reduce-fp32"])


@pytest.mark.parametrize("name", ["none", "ddp-fp32", "majority-all-reduce-overlap"])
def test_a_vector_has_no_backward(name):
    with pytest.raises(InvalidArgumentError, match="bare vector"):
        VectorWorkload(10).check_methods(["all-reduce-fp32", name])


@pytest.mark.parametrize(
    "arguments", [{"layers": 0}, {"batch_size": -1}, {"backwards": 0}, {"width": 10, "heads": 3}]
)
def test_a_gpt_that_cannot_be_is_an_error(arguments):
    with pytest.raises(InvalidArgumentError, match=r"expected|multiple"):
        GptWorkload(**arguments)


@pytest.mark.parametrize(
    "arguments", [{"layers": 0}, {"width": -1}, {"step_s": -0.1}, {"step_s": float("nan")}]
)
def test_a_device_that_cannot_be_is_an_error(arguments):
    with pytest.raises(InvalidArgumentError, match="expected"):
        DeviceWorkload(**arguments)


def test_a_device_trains_with_what_a_gpt_trains_with():
    DeviceWorkload().check_methods(["none", "ddp-fp32", "majority-all-reduce-overlap"])
    with pytest.raises(InvalidArgumentError, match="all-reduce-fp32"):
        DeviceWorkload().check_methods(["all-reduce-fp32"])


def test_an_empty_vector_is_an_error():
    with pytest.raises(InvalidArgumentError, match="n_elements is 0"):
        VectorWorkload(0)
