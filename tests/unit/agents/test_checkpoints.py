import errno
import os
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hacrl_core.agents import small_files
from hacrl_core.agents.checkpoints import write_tensors
from hacrl_core.agents.small_files import names_in, read_small
from hacrl_core.artifacts import direct

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 5), max_size=3)


@pytest.mark.parametrize("most", [0, small_files.MOST_BYTES], ids=["streamed", "at once"])
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
@given(shapes=st.dictionaries(NAMES.filter(lambda name: name != "__metadata__"), SHAPES, max_size=4))
def test_the_bytes_are_the_library_s(tmp_path_factory, shapes, metadata, most):
    folder = tmp_path_factory.mktemp("files")
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_files, "MOST_BYTES", most)
        write_tensors(tensors, folder / "ours", metadata)
    save_file(tensors, folder / "theirs", metadata=metadata)
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()
    read = read_small(folder / "theirs")
    assert read is not None
    assert read.keys() == tensors.keys() == names_in(folder / "theirs")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("most", [0, small_files.MOST_BYTES], ids=["streamed", "at once"])
def test_a_tensor_of_several_pieces_and_one_that_is_not_contiguous(tmp_path, monkeypatch, most):
    monkeypatch.setattr(small_files, "MOST_BYTES", most)
    tensors = {"long": torch.randn(70_001), "turned": torch.randn(30, 50).T}
    write_tensors(tensors, tmp_path / "file")
    read = load_file(tmp_path / "file")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_other_numbers_than_float32(tmp_path):
    tensors = {"a": torch.arange(5), "b": torch.randn(3).bfloat16(), "c": torch.randn(2)}
    write_tensors(tensors, tmp_path / "file")
    read = load_file(tmp_path / "file")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def refuse_to_open(monkeypatch):
    opened = os.open

    def refusing(path, flags, mode=0o777):
        if flags & direct._DIRECT:
            raise OSError(errno.EINVAL, "no direct files here")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)


def refuse_to_move(monkeypatch):
    """Memory that starts behind a page's first byte: the system opens the file and refuses what follows."""
    memory = small_files._memory
    monkeypatch.setattr(small_files, "_memory", lambda size: memory(size + 8)[8:])


@pytest.mark.parametrize("refuse", [refuse_to_open, refuse_to_move])
def test_where_the_system_refuses_direct_files_they_are_written_and_read_as_usual(tmp_path, monkeypatch, refuse):
    tensors = {"long": torch.randn(70_001), "short": torch.randn(3)}
    refuse(monkeypatch)
    write_tensors(tensors, tmp_path / "ours")
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    read = read_small(tmp_path / "ours")
    assert read is not None
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def with_head(head: bytes) -> bytes:
    return struct.pack("<Q", len(head)) + head + bytes(8)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 60),
        with_head(b"{"),
        with_head(b"[1] "),
        with_head(b'{"a": 1}'),
        with_head(b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'),
        with_head(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}'),
        with_head(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}'),
        with_head(b'{"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}'),
        with_head(b'{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}'),
        with_head(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0.0,8.0]}}'),
        with_head(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}'),
        with_head(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'),  # more bytes than numbers
        with_head(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
        ),
    ],
)
def test_what_is_no_small_file_of_float32_is_left_to_the_library(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    assert read_small(tmp_path / "file") is None


@pytest.mark.parametrize("spaces", range(4))
def test_a_head_of_any_length_is_read(tmp_path, spaces):
    """Other writers of safetensors do not fill it up to eight bytes."""
    tensor = torch.randn(2)
    head = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}' + b" " * spaces
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(head)) + head + tensor.numpy().tobytes())
    assert torch.equal(load_file(tmp_path / "file")["a"], tensor)
    read = read_small(tmp_path / "file")
    assert read is None if len(head) % 4 else torch.equal(read["a"], tensor)


def test_a_large_file_stays_in_the_page_cache(tmp_path, monkeypatch):
    write_tensors({"a": torch.randn(3)}, tmp_path / "file")
    monkeypatch.setattr(small_files, "MOST_BYTES", 8)
    assert read_small(tmp_path / "file") is None


def test_a_file_that_ends_early_is_no_endless_loop(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(100))
    monkeypatch.setattr(os, "preadv", lambda handle, buffers, start: 0)
    with pytest.raises(OSError, match="ended before its size"):
        read_small(tmp_path / "file")


def test_what_a_process_wrote_it_reads_once_from_memory_and_never_after_a_change(tmp_path, monkeypatch):
    file, numbers = tmp_path / "file", {"a": torch.arange(3000.0), "b": torch.ones(2, 2)}
    reads = []
    read_direct = small_files.read_direct
    monkeypatch.setattr(small_files, "read_direct", lambda path, into: reads.append(path) or read_direct(path, into))
    write_tensors(numbers, file)
    moved = file.rename(tmp_path / "published")  # publishing moves it
    first = read_small(moved)
    assert not reads
    first["a"].zero_()  # it is the reader's own now
    second = read_small(moved)
    assert reads == [moved]
    torch.testing.assert_close(second, numbers)
    write_tensors(numbers, file)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(0, 0))  # the system's clock may not have moved since
    assert not torch.equal(read_small(file)["b"], numbers["b"])


def test_memory_that_nobody_reads_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(small_files, "_kept", {})
    monkeypatch.setattr(small_files, "_KEPT_BYTES", 100_000)
    for place in range(9):
        write_tensors({"a": torch.zeros(8000)}, tmp_path / str(place))
    assert [len(memory) for memory in small_files._kept.values()] == [(tmp_path / "8").stat().st_size] * 3
    assert read_small(tmp_path / "0")["a"].shape == (8000,)
