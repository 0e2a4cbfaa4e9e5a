"""A file sorted in little memory is what NumPy sorts in one piece; an interrupted sort leaves nothing."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.core.errors import InputError
from lengthwise.data import external_sort
from lengthwise.data.external_sort import order_file, sort_file

DTYPES = [f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)]
DTYPES += ["bool", "float16", "float32", "float64"]
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 16_777_216.0])
LEAST = 1 << 16


def make(seed, shape, dtype, *, kind):
    """``whole``: any bits of the dtype; ``few``: three values; ``special``: floats of note."""
    generator, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if kind == "special" and dtype.kind == "f":
        with np.errstate(over="ignore"):
            return generator.choice(SPECIAL, shape).astype(dtype)
    if kind == "whole" and dtype.kind != "b":
        return np.frombuffer(generator.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
    return generator.integers(0, 3 if dtype.kind != "b" else 2, shape).astype(dtype)


def same_bits(found, wanted):
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert found.tobytes() == wanted.tobytes()


def stable(columns):
    return np.lexsort(columns.T[::-1] if columns.ndim == 2 else [columns])


def check(folder, rows, key):
    """Rows of bits that any number can be."""
    np.save(folder / "rows.npy", rows)
    sort_file(folder / "rows.npy", folder / "sorted.npy", memory_bytes=LEAST)
    same_bits(np.load(folder / "sorted.npy"), rows[stable(rows)])
    np.save(folder / "key.npy", key)
    sort_file(folder / "rows.npy", folder / "sorted.npy", memory_bytes=LEAST, key=folder / "key.npy")
    same_bits(np.load(folder / "sorted.npy"), rows[stable(key)])
    order_file(folder / "key.npy", folder / "order.npy", memory_bytes=LEAST)
    same_bits(np.load(folder / "order.npy"), stable(key))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_out_as_numpy_sorts_it(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(external_sort, "COPIES", 40)  # so that few rows are many runs
    for kind in ("whole", "special", "few"):
        check(tmp_path, make(1, (300,), dtype, kind=kind), make(2, (300,), dtype, kind=kind))
        check(tmp_path, make(3, (150, 3), dtype, kind=kind), make(4, (150,), dtype, kind=kind))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.integers(0, 999), st.integers(0, 200), st.sampled_from([(), (1,), (2,)]), st.sampled_from(DTYPES),
    st.sampled_from(DTYPES), st.sampled_from(["whole", "special", "few"]), st.sampled_from([1, 30, 100]),
)  # fmt: skip
def test_any_file_in_any_number_of_runs_comes_out_as_numpy_sorts_it(
    tmp_path_factory, seed, size, shape, dtype, key_dtype, kind, copies
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(external_sort, "COPIES", copies)
        rows = make(seed, (size, *shape), dtype, kind=kind)
        check(tmp_path_factory.mktemp("sort"), rows, make(seed + 1, (size,), key_dtype, kind=kind))


def test_other_byte_orders_are_read(tmp_path):
    numbers = np.random.default_rng(0).standard_normal(20_000).astype(">f4")
    np.save(tmp_path / "big.npy", numbers)
    sort_file(tmp_path / "big.npy", tmp_path / "sorted.npy", memory_bytes=LEAST)
    same_bits(np.load(tmp_path / "sorted.npy"), np.sort(numbers.astype("<f4")))


def test_no_more_rows_are_held_than_memory_takes(tmp_path, monkeypatch):
    np.save(tmp_path / "keys.npy", np.random.default_rng(0).permutation(200_000).astype(np.float32))
    seen, sort = [], external_sort._order
    monkeypatch.setattr(external_sort, "_order", lambda keys: (seen.append(len(keys)), sort(keys))[1])
    told = []
    order_file(
        tmp_path / "keys.npy", tmp_path / "out.npy", memory_bytes=1 << 19, on_progress=lambda *said: told.append(said)
    )
    assert max(seen) <= (1 << 19) / (external_sort.COPIES * (4 + 8 + 8)) < 10_000
    assert told[-1] == ("merging", 200_000, 200_000) and ("sorting runs", 200_000, 200_000) in told
    assert len(told) < 100  # rounds of the merge take whole blocks


@pytest.mark.parametrize("phase", ["sorting runs", "merging"])
def test_an_interrupted_sort_leaves_the_old_file_and_nothing_else(tmp_path, phase):
    np.save(tmp_path / "keys.npy", np.random.default_rng(0).permutation(9_000))
    (tmp_path / "out.npy").write_bytes(b"old")

    def stop(what, done, of):
        if what == phase and done > of // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sort_file(tmp_path / "keys.npy", tmp_path / "out.npy", memory_bytes=LEAST, on_progress=stop)
    assert (tmp_path / "out.npy").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys.npy", "out.npy"]


def test_what_cannot_be_sorted_is_refused_by_name(tmp_path, monkeypatch):
    files = {
        "words": np.array(["a", "b"]), "complex": np.ones(3, complex), "cube": np.ones((2, 2, 2)),
        "rows": np.ones((4, 2)), "fortran": np.ones((3, 4)).T, "short": np.ones(3), "scalar": np.array(1),
        "empty": np.ones((3, 0)),
    }  # fmt: skip
    path = {name: tmp_path / f"{name}.npy" for name in [*files, "missing"]}
    for name, values in files.items():
        np.save(path[name], values)
    out = tmp_path / "out.npy"

    def refused(message, name, function=sort_file, **options):
        with pytest.raises(InputError, match=re.escape(message)):
            function(path[name], options.pop("to", out), **{"memory_bytes": LEAST, **options})

    for name in ("words", "complex"):
        refused(f"{path[name]} does not hold numbers", name)
    refused("cube.npy has shape [2, 2, 2]; save [n] or [n, D]", "cube")
    refused("empty.npy has shape [3, 0]; save [n] or [n, D]", "empty")
    refused("scalar.npy has shape []; save [n]", "scalar", order_file)
    refused("rows.npy has shape [4, 2]; save [n]", "rows", order_file)
    refused("is in Fortran order", "fortran")
    refused("is no .npy file that can be read", "missing")
    refused("has 3 numbers and", "rows", key=path["short"])
    refused("memory_bytes is 1,000; give 65,536", "rows", memory_bytes=1000)
    refused("is no folder to write x.npy to", "rows", to=tmp_path / "nowhere" / "x.npy")
    monkeypatch.setattr(external_sort.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10}))
    refused("takes 128 bytes of disk and 10 are free", "rows")
    assert not out.exists()
