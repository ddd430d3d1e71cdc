"""State on the wire: plain values and tensors, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError, WireError
from stoker.train.packing import decode_header, encode_header, pack, unpack

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(0, 99), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    tensors: list[torch.Tensor] = []
    header, shapes = decode_header(encode_header(pack(value, tensors), tensors))
    assert shapes == []
    assert unpack(header, []) == value


def test_an_optimizers_state_comes_back() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensors: list[torch.Tensor] = []
    header, shapes = decode_header(encode_header(pack(optimizer.state_dict(), tensors), tensors))
    assert shapes == [(t.dtype, tuple(t.shape)) for t in tensors]
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
    "raw",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode([1, [["nn", [1]]]]),
        msgspec.msgpack.encode([1, [["float32", ["x"]]]]),
    ],
)
def test_a_broken_header_is_a_typed_error(raw: bytes) -> None:
    with pytest.raises(WireError):
        decode_header(raw)


@pytest.mark.parametrize("value", [{"t": 4}, {"x": 1}, {"d": 3}, {"d": [], "t": 0}])
def test_a_broken_value_is_a_typed_error(value: Any) -> None:
    with pytest.raises(WireError):
        unpack(value, [])
