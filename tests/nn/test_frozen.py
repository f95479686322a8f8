"""The frozen base of a model: which tensors belong to it, how copies share it, and how it becomes ordinary again."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from fedfactor.nn.frozen import Frozen, base_of, freeze, released
from fedfactor.nn.norms import batch_norms
from fedfactor.nn.state import tensors_of


def network() -> nn.Sequential:
    """Return a frozen block (convolution, batch norms with and without weights), and a trained one."""
    block = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.BatchNorm2d(2, affine=False))
    return nn.Sequential(block.requires_grad_(False), nn.BatchNorm2d(2), nn.BatchNorm2d(2, affine=False))


def test_frozen_parameters_and_the_buffers_of_frozen_modules_are_the_base() -> None:
    model = freeze(network())
    statistics = {"running_mean", "running_var", "num_batches_tracked"}
    base = {"0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"}
    base |= {f"0.{norm}.{name}" for norm in (1, 2) for name in statistics}
    assert base_of(model).keys() == base
    rest = {"1.weight", "1.bias", *(f"{norm}.{name}" for norm in (1, 2) for name in statistics)}
    assert tensors_of(model).keys() == rest, "a norm without weights belongs to the block that contains it"
    assert batch_norms(model).keys() == {"1", "2"}


def test_a_frozen_norm_uses_the_statistics_of_the_base_in_training_too() -> None:
    model, x = freeze(network()).train(), torch.randn(4, 1, 5, 5)
    before = copy.deepcopy(model[0][1].state_dict())
    model(x)
    assert all(torch.equal(before[name], tensor) for name, tensor in model[0][1].state_dict().items())
    assert model[1].num_batches_tracked == 1
    frozen = model[0](x)
    assert torch.equal(frozen, model.eval()[0](x)), "its output does not depend on the other examples of the batch"


def test_copies_share_the_base_and_nothing_else() -> None:
    model = freeze(network())
    for other in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))):
        assert other[0][0].weight.data_ptr() == model[0][0].weight.data_ptr()
        assert other[1].weight.data_ptr() != model[1].weight.data_ptr()
        assert base_of(other).keys() == base_of(model).keys()
        other.double()
    assert model[0][0].weight.dtype == torch.float32, "moving a copy does not move the others"
    again = pickle.loads(pickle.dumps(model))
    assert isinstance(again[0][0].weight, Frozen) and base_of(again).keys() == base_of(model).keys()


def test_tied_weights_stay_tied() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight.requires_grad_(False)
    model = copy.deepcopy(freeze(nn.Sequential(first, second)))
    assert model[0].weight is model[1].weight and base_of(model).keys() == {"0.weight"}
    assert released(model)[0].weight is model[1].weight


def test_a_released_model_is_ordinary_and_has_its_own_memory() -> None:
    model = freeze(network())
    free = released(copy.deepcopy(model))
    assert not base_of(free) and tensors_of(free).keys() == free.state_dict().keys()
    assert type(free[0][0].weight) is nn.Parameter and not free[0][0].weight.requires_grad
    assert free[0][0].weight.data_ptr() != model[0][0].weight.data_ptr()
    assert all(type(layer).__module__.startswith("torch.") for layer in free.modules())
    free.train()(torch.randn(4, 1, 5, 5))
    assert free[0][1].num_batches_tracked == 1 and model[0][1].num_batches_tracked == 0
