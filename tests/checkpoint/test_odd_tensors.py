"""Tensors of a model that have no form in a file, and those that are kept by other means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import distlion
from distlion.errors import CheckpointError


def wrap(first: float, second: float) -> nn.Parameter:
    """Return a frozen weight that has no memory of its own, as quantized ones have none."""
    parts = [torch.full((3, 4), value) for value in (first, second)]
    return nn.Parameter(TwoTensor(*parts), requires_grad=False)


def make(*frozen: nn.Parameter) -> tuple[nn.ModuleList, distlion.VirtualCluster]:
    """Make a model of one trained layer, and one of each frozen weight."""
    model = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(1 + len(frozen)))
    for layer, weight in zip(list(model)[1:], frozen, strict=True):
        layer.weight = weight
    return model, distlion.VirtualCluster(model[0].parameters(), workers=2)


def make_with_buffer(value: Any, name: str = "odd") -> tuple[nn.Module, distlion.VirtualCluster]:
    model = nn.Linear(4, 3)
    model.register_buffer(name, value)
    return model, distlion.VirtualCluster(model.parameters(), workers=2)


def test_frozen_wrappers_of_one_shape_are_not_taken_for_one_another(tmp_path: Path) -> None:
    distlion.save_checkpoint(tmp_path, *make(wrap(1, 2), wrap(3, 4)), only_trained=True)
    model, cluster = make(wrap(1, 2), wrap(3, 4))
    distlion.load_checkpoint(tmp_path, model, cluster)
    assert [float(layer.weight.b[0, 0]) for layer in list(model)[1:]] == [2, 4]
    with pytest.raises(CheckpointError, match=r"2\.weight \(one of 1\).*has changed"):
        distlion.load_checkpoint(tmp_path, *make(wrap(1, 2), wrap(3, 5)))


def test_a_wrapper_saved_as_another_one_keeps_the_values_of_the_model(tmp_path: Path) -> None:
    shared = wrap(1, 2)  # as versions that took wrappers for one another saved any two
    distlion.save_checkpoint(tmp_path, *make(shared, shared), only_trained=True)
    model, cluster = make(wrap(1, 2), wrap(3, 4))
    distlion.load_checkpoint(tmp_path, model, cluster)
    assert float(model[2].weight.b[0, 0]) == 4


def test_a_wrapper_that_is_to_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1\.weight is a TwoTensor.*only_trained=True"):
        distlion.save_checkpoint(tmp_path, *make(wrap(1, 2)))


def make_quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


ODD = {
    "complex": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "uint16": lambda: torch.ones(3, dtype=torch.uint16),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.ones(3, device="meta"),
    "quantized": make_quantized,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ODD)
def test_a_buffer_that_cannot_be_written_is_named_ahead_and_by_the_save(
    tmp_path: Path, kind: str
) -> None:
    model, cluster = make_with_buffer(ODD[kind]())
    for call in (distlion.check_checkpoint_folder, distlion.save_checkpoint):
        with pytest.raises(CheckpointError, match=r"odd is a (nested )?tensor of torch"):
            call(tmp_path, model, cluster)
    assert not list(tmp_path.iterdir())


def test_what_is_left_out_need_not_be_writable(tmp_path: Path) -> None:
    model, cluster = make_with_buffer(ODD["complex"]())
    distlion.check_checkpoint_folder(tmp_path, model, cluster, only_trained=True)
    distlion.save_checkpoint(tmp_path, model, cluster, only_trained=True)
    distlion.load_checkpoint(tmp_path, model, cluster)
    model.odd.mul_(2)
    with pytest.raises(CheckpointError, match=r"odd .*has changed"):
        distlion.load_checkpoint(tmp_path, model, cluster)


def test_extra_state_that_cannot_be_written_is_found_ahead(tmp_path: Path) -> None:
    class Layer(nn.Linear):
        def get_extra_state(self) -> set[int]:
            return {1, 2}

    model = Layer(4, 3)
    cluster = distlion.VirtualCluster(model.parameters(), workers=2)
    with pytest.raises(CheckpointError, match=r"model\._extra_state is a set"):
        distlion.check_checkpoint_folder(tmp_path, model, cluster)


def test_the_one_name_that_the_format_keeps_for_itself_is_refused(tmp_path: Path) -> None:
    model, cluster = make_with_buffer(torch.ones(2), "__metadata__")
    for call in (distlion.check_checkpoint_folder, distlion.save_checkpoint):
        with pytest.raises(CheckpointError, match="'__metadata__', which the safetensors format"):
            call(tmp_path, model, cluster)


def test_a_view_of_negative_values_has_them_again(tmp_path: Path) -> None:
    number = torch.complex(torch.zeros(1), torch.ones(1)).conj().imag
    assert number.is_neg() and number.is_contiguous()
    model, cluster = make_with_buffer(number)
    distlion.save_checkpoint(tmp_path, model, cluster, extra=number)
    model.odd.zero_()
    found = distlion.load_checkpoint(tmp_path, model, cluster)
    assert model.odd.tolist() == [-1] and found.extra.tolist() == [-1]


class Lacking(nn.Linear):
    """A layer whose state lacks its trained bias."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_state_dict_post_hook(remove_bias)
        self.register_load_state_dict_pre_hook(put_bias_back)


def remove_bias(layer: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    del state[f"{prefix}bias"]


def put_bias_back(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}bias"] = layer.bias.detach()


@pytest.mark.parametrize("only_trained", [False, True])
def test_a_trained_parameter_that_the_state_of_the_model_lacks_comes_back(
    tmp_path: Path, only_trained: bool
) -> None:
    model = Lacking()
    cluster = distlion.VirtualCluster(model.parameters(), workers=2)
    saved = model.bias.detach().clone()
    distlion.save_checkpoint(tmp_path, model, cluster, only_trained=only_trained)
    with torch.no_grad():
        model.bias.zero_()
    distlion.load_checkpoint(tmp_path, model, cluster)
    assert torch.equal(model.bias, saved)
