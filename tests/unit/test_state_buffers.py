"""Buffers are what they were at the last commit, however many there are by then and whatever their shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.train.state_buffers import BufferCopies


class Bank(torch.nn.Module):
    """Grows with what it sees; beside it a cache that the state_dict does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(2, 3))
        self.register_buffer("later", None)
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def grow(self, rows: int, dtype: torch.dtype = torch.float32) -> None:
        self.rows = torch.ones(rows, 3, dtype=dtype)


def shorter(bank: Bank) -> None:
    bank.grow(1)


def longer(bank: Bank) -> None:
    bank.grow(7)


def other_type(bank: Bank) -> None:
    bank.grow(2, torch.float64)


def in_place(bank: Bank) -> None:
    bank.rows.add_(1)


def made_anew(bank: Bank) -> None:
    bank.grow(2)


def one_more(bank: Bank) -> None:
    bank.register_buffer("seen", torch.ones(4))


def one_less(bank: Bank) -> None:
    del bank.rows


def first_value(bank: Bank) -> None:
    bank.later = torch.ones(3)


def no_value(bank: Bank) -> None:
    bank.rows = None


def in_inference_mode(bank: Bank) -> None:
    with torch.inference_mode():
        bank.rows = torch.ones(2, 3)


def expanded(bank: Bank) -> None:
    bank.rows = torch.ones(1, 3).expand(2, 3)


@pytest.mark.parametrize(
    "change",
    [
        shorter,
        longer,
        other_type,
        in_place,
        made_anew,
        one_more,
        one_less,
        first_value,
        no_value,
        in_inference_mode,
        expanded,
    ],
)
def test_what_becomes_of_a_buffer_is_undone_and_may_be_kept(change: Callable[[Bank], None]) -> None:
    bank, copies = Bank(), BufferCopies()
    copies.renew([bank])
    before = {name: tensor.clone() for name, tensor in bank.state_dict().items()}
    change(bank)
    copies.put_back()
    assert same(bank.state_dict(), before)
    assert bank.later is None
    change(bank)
    copies.renew([bank])
    after = {name: tensor.clone() for name, tensor in bank.state_dict().items()}
    assert not same(after, before)
    bank.grow(5)
    copies.put_back()
    assert same(bank.state_dict(), after)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype and torch.equal(one[k], other[k]) for k in one
    )


class Rotary(torch.nn.Module):
    """As language models have it: what it remembers of its cache is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.good_for = 0

    def forward(self, length: int) -> torch.Tensor:
        if length > self.good_for:
            self.good_for = length
            self.register_buffer("cos", torch.arange(length), persistent=False)
        return self.cos[:length]


def test_a_modules_own_cache_stays_as_long_as_the_module_believes_it_to_be() -> None:
    rotary, copies = Rotary(), BufferCopies()
    for known, asked in ((0, 4), (4, 9)):
        rotary.good_for = known
        copies.renew([rotary])
        rotary(asked)
        copies.put_back()
        assert len(rotary(asked)) == asked


def test_a_cache_of_the_same_shape_is_undone() -> None:
    bank, copies = Bank(), BufferCopies()
    copies.renew([bank])
    bank.cache.add_(1)
    copies.put_back()
    assert bank.cache.tolist() == [0, 0]
    assert "cache" not in bank.state_dict()


def test_a_tensor_that_modules_share_is_copied_once_and_stays_shared() -> None:
    mask = torch.zeros(3)
    layers = torch.nn.Sequential(*(torch.nn.Module() for _ in range(3)))
    for layer in layers:
        layer.register_buffer("mask", mask)
    copies = BufferCopies()
    copies.renew([layers, layers])
    mask.add_(1)
    copies.put_back()
    assert mask.tolist() == [0, 0, 0]
    assert all(layer.mask is mask for layer in layers)
    layers[1].mask = torch.full((3,), 5.0)
    copies.renew([layers])
    layers[0].mask.fill_(9)
    layers[1].mask.fill_(9)
    copies.put_back()
    assert [layer.mask.tolist() for layer in layers] == [[0, 0, 0], [5, 5, 5], [0, 0, 0]]


def test_no_memory_is_taken_anew_while_shapes_stay() -> None:
    bank, copies = Bank(), BufferCopies()
    copies.renew([bank])
    first = copies._kept[bank].copies["rows"]
    for _ in range(3):
        bank.rows.add_(1)
        copies.renew([bank])
    kept = copies._kept[bank].copies["rows"]
    assert kept is first
    assert torch.equal(kept, bank.rows)
    assert kept is not bank.rows


def test_a_module_that_came_since_keeps_its_buffers() -> None:
    model, copies = torch.nn.Sequential(torch.nn.Linear(1, 1)), BufferCopies()
    copies.renew([model])
    model.append(torch.nn.BatchNorm1d(1))
    copies.put_back()
    assert model(torch.ones(2, 1)).shape == (2, 1)


@given(st.lists(st.tuples(st.sampled_from(["renew", "back", "drop", "a", "b"]), st.integers(0, 4))))
def test_as_a_plain_dictionary_would_do_it(moves: list[tuple[str, int]]) -> None:
    module, copies = torch.nn.Module(), BufferCopies()
    copies.renew([module])
    twin: dict[str, list[float]] = {}
    kept: dict[str, list[float]] = {}
    for at, (move, size) in enumerate(moves):
        if move == "renew":
            copies.renew([module])
            kept = dict(twin)
        elif move == "back":
            copies.put_back()
            twin = dict(kept)
        elif move == "drop":
            for name in twin:
                delattr(module, name)
            twin = {}
        else:
            module.register_buffer(move, torch.full((size,), float(at)))
            twin[move] = [float(at)] * size
        assert {name: tensor.tolist() for name, tensor in module.named_buffers()} == twin
