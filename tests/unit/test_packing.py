"""State on the wire: plain values and tensors, and nothing else."""

from __future__ import annotations

import tempfile
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError, WireError
from stoker.train.checkpoints.storage_port import RunStorage
from stoker.train.packing import decode_header, encode_header, normalised, pack, unpack
from stoker.train.transfer import bytes_of

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**140), 2**140)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
plain = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(0, 99) | st.tuples(st.integers()), inner, max_size=4)
    ),
    max_leaves=20,
)


class Best(NamedTuple):
    loss: float
    epoch: int


SCALARS = [
    *(np.float64(0.5), np.float32(0.5), np.float16(0.5), np.int64(-3), np.uint8(3), np.uint64(2**64 - 1)),
    *(np.bool_(True), np.str_("x"), np.bytes_(b"x"), np.array(7)),
]
CONTAINERS: list[Any] = [
    OrderedDict(a=1),
    defaultdict(list, a=[np.float64(2.5)]),
    Counter("aab"),
    Best(np.float32(0.5), 3),  # type: ignore[arg-type]
    np.random.default_rng(1).bit_generator.state,
    {np.int64(3): (np.float64(1), [np.bool_(False)])},
]
TENSORS = [
    *(torch.tensor([0.0, 1.0, 2.0]).to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)),
    *(torch.tensor([0, 1, 2]).to(dtype) for dtype in (torch.bool, torch.uint8, torch.uint16, torch.int64)),
    *(torch.tensor(2.5), torch.empty(0, 3), torch.arange(6).reshape(2, 3).t(), torch.ones(1).expand(4)),
    torch.ones(2).to(torch.float8_e4m3fn),
    torch.nn.Parameter(torch.ones(2)),
    torch.tensor([1 + 2j]).conj(),
    torch.tensor([1 + 2j]).conj().imag,
]


def over_the_wire(value: Any) -> Any:
    """As `send_state` and `receive_state` do it, byte by byte."""
    tensors: list[torch.Tensor] = []
    header, described = decode_header(encode_header(pack(value, tensors), tensors))
    received = [torch.empty(shape, dtype=dtype) for dtype, shape, _ in described]
    for sent, into in zip(tensors, received, strict=True):
        bytes_of(into).copy_(bytes_of(sent))
    return unpack(header, received)


def from_a_checkpoint(value: Any) -> Any:
    with tempfile.TemporaryDirectory() as name:
        storage = RunStorage(name, keep=2)
        assert storage.save(1, {"value": normalised(value)}), storage.problem
        found = storage.newest()
    assert found is not None
    return found[1]["value"]


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all through."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(bytes_of(one), bytes_of(other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(k, j) and same(v, w) for (k, v), (j, w) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("value", [*SCALARS, *CONTAINERS, *TENSORS], ids=lambda v: f"{type(v).__name__}")
def test_all_that_can_be_copied_is_the_same_on_the_wire_and_in_a_checkpoint(value: Any) -> None:
    held = {"held": value}
    assert same(over_the_wire(held), normalised(held))
    assert same(from_a_checkpoint(held), normalised(held))
    assert isinstance(value, torch.Tensor) or normalised(value) == value, "and of equal value"


@settings(max_examples=30, deadline=None)
@given(plain)
def test_plain_values_come_back_from_a_checkpoint(value: Any) -> None:
    assert same(from_a_checkpoint(value), value)


@given(plain)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    tensors: list[torch.Tensor] = []
    header, shapes = decode_header(encode_header(pack(value, tensors), tensors))
    assert shapes == []
    assert same(unpack(header, []), value)


def test_an_optimizers_state_comes_back() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensors: list[torch.Tensor] = []
    header, shapes = decode_header(encode_header(pack(optimizer.state_dict(), tensors), tensors))
    assert shapes == [(t.dtype, tuple(t.shape), "cpu") for t in tensors]
    loaded = unpack(header, [t.clone() for t in tensors])
    other = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    other.load_state_dict(loaded)
    assert torch.equal(
        other.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )


def test_numpy_scalars_become_numbers() -> None:
    assert pack({"a": np.float64(1.5)}, []) == {"d": [["a", 1.5]]}


def test_other_objects_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"state\['log'\] is a object"):
        pack({"log": object()}, [])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (np.complex128(1j), "a complex128"),
        (np.datetime64("2026-01-01"), "a datetime64"),
        (np.longdouble(1), "a longdouble"),
        (np.ones(3), "a ndarray"),
        ({1, 2}, "a set"),
        (torch.zeros(2, 2).to_sparse(), "a sparse_coo tensor"),
    ],
)
def test_what_has_no_plain_form_is_refused_before_it_is_needed(value: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"state\['x'\] is {named}"):
        pack({"x": value}, [])


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode([1, [["nn", [1], "cpu"]]]),
        msgspec.msgpack.encode([1, [["float32", ["x"], "cpu"]]]),
        msgspec.msgpack.encode([1, [["float32", [1], 7]]]),
        msgspec.msgpack.encode([1, [["float32", [1]]]]),
    ],
)
def test_a_broken_header_is_a_typed_error(raw: bytes) -> None:
    with pytest.raises(WireError):
        decode_header(raw)


@pytest.mark.parametrize("value", [{"t": 4}, {"x": 1}, {"d": 3}, {"d": [], "t": 0}, {"i": "x"}, {"i": 3}])
def test_a_broken_value_is_a_typed_error(value: Any) -> None:
    with pytest.raises(WireError):
        unpack(value, [])
