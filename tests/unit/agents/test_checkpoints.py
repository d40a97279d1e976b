import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hacrl_core.agents.checkpoints import write_tensors

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 5), max_size=3)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
@given(shapes=st.dictionaries(NAMES.filter(lambda name: name != "__metadata__"), SHAPES, max_size=4))
def test_the_bytes_are_the_library_s(tmp_path_factory, shapes, metadata):
    folder = tmp_path_factory.mktemp("files")
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    write_tensors(tensors, folder / "ours", metadata)
    save_file(tensors, folder / "theirs", metadata=metadata)
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()


def test_a_tensor_of_several_pieces_and_one_that_is_not_contiguous(tmp_path):
    tensors = {"long": torch.randn(70_001), "turned": torch.randn(30, 50).T}
    write_tensors(tensors, tmp_path / "file")
    read = load_file(tmp_path / "file")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_other_numbers_than_float32(tmp_path):
    tensors = {"a": torch.arange(5), "b": torch.randn(3).bfloat16(), "c": torch.randn(2)}
    write_tensors(tensors, tmp_path / "file")
    read = load_file(tmp_path / "file")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
