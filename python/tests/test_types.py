"""Annotations: every name in them exists, and none accepts everything."""

import inspect
import typing

import ml_dtypes
import numpy as np
import pytest

import longspan
from longspan import _types

FUNCTIONS = [longspan.attend, longspan.Attention.__init__, longspan.Attention.__call__, longspan.Attention.append,
             longspan.Attention.wait, longspan.merge_attn_states, longspan.merge_state, longspan.merge_states,
             longspan.cross_rank_merge, longspan.segmented_attention, longspan.reduce_segments,
             longspan.context_attention, longspan.append_kv, longspan.Reshard.__init__, longspan.Reshard.__call__,
             longspan.reshard, longspan.shard, longspan.unshard, longspan.alone, longspan.from_environment,
             longspan.from_exchange, longspan.from_mpi4py]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_every_argument_has_a_type(function):
    hints = typing.get_type_hints(function, localns={**vars(longspan), **vars(longspan.mask), **vars(typing), **vars(_types)})
    for name in inspect.signature(function).parameters:
        if name == "self":
            continue
        assert name in hints, name
        if (function, name) != (longspan.from_mpi4py, "comm"):  # mpi4py may not be there
            assert typing.Any not in (hints[name], *typing.get_args(hints[name])), name


def test_what_an_array_is():
    for array in (np.zeros(3), np.zeros(3, ml_dtypes.bfloat16)):
        assert isinstance(array, _types.SupportsDLPack)
    for other in ([1.0], "float32", 3, None, np.float32):
        assert not isinstance(other, _types.SupportsDLPack) or isinstance(other, type)
    assert isinstance(np.dtype("float16"), _types.HasItemsize) and not isinstance("float16", _types.HasItemsize)


def test_names_are_those_that_the_library_takes():
    q = np.zeros((2, 4, 16), np.float32)

    def names(of):
        return typing.get_args(of)

    assert names(_types.Strategy) == ("auto", *longspan.strategies())
    for layout in names(_types.Layout):
        assert longspan.Sharding(layout).layout == layout
    with pytest.raises(longspan.InputError) as caught:
        longspan.Sharding("spiral")
    assert str(caught.value).endswith(", ".join(names(_types.Layout)))
    for exchange in names(_types.Exchange):
        longspan.attend(q, q, q, exchange=exchange)
    for part in names(_types.Part):
        longspan.attend(q, q, q, results=part)
    for alibi in names(_types.Alibi):
        longspan.Attention(heads=4, head_dim=16, alibi=alibi)
    for base in names(_types.Base):
        longspan.merge_state(q, q[..., 0], q, q[..., 0], base=base)
    for dtype in names(_types.DTypeName):
        longspan.Reshard(lengths=[1], kv_heads=1, head_dim=8, dtype=dtype)
    for device in names(_types.Device):
        try:
            longspan.alone(device)
        except longspan.LongspanError as error:
            assert device == "cuda" and not isinstance(error, longspan.InputError), error
