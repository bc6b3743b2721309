"""Files of weights: what is in them is plain numbers under names, or they are refused."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from trainer.errors import RecipeError
from trainer.weights.files import read_weights
from trainer.weights.streaming import WeightFiles, tensors_in

QUANTISED = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": torch.eye(3).to_sparse()}, r"a \(sparse\)"),
        ({"a": torch.eye(3).to_sparse_csr()}, r"a \(sparse\)"),
        ({"a": torch.zeros(2), "b": QUANTISED}, r"b \(quantised\)"),
        ({"a": torch.zeros(2, device="meta")}, r"a \(without values\)"),
        ({1: torch.zeros(2)}, r"1 \(key is not a string\)"),
        ({("a", "b"): torch.zeros(2)}, r"\(key is not a string\)"),
    ],
)
def test_tensors_that_no_module_can_load_are_refused(tmp_path, state, message, zipped):
    torch.save(state, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(RecipeError, match=rf"w\.pt contains unsupported tensors, .*{message}"):
        read_weights(tmp_path / "w.pt")


def test_parameters_and_views_are_read_as_tensors_without_gradients(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    state = {"column": whole[:, 1], "turned": whole.T, "wide": torch.ones(1).expand(5)}
    state |= dict(nn.Linear(2, 2).named_parameters())
    torch.save(state, tmp_path / "w.pt")
    found = read_weights(tmp_path / "w.pt")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert {(type(value), value.requires_grad) for value in found.values()} == {(torch.Tensor, False)}


def test_a_link_is_followed(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "real.safetensors")
    (tmp_path / "link.safetensors").symlink_to("real.safetensors")
    assert torch.equal(read_weights(tmp_path / "link.safetensors")["a"], torch.ones(2))


def test_a_large_file_is_mapped_and_not_read(tmp_path):
    """16 GB that are not on the disk: a hole in the file."""
    path = tmp_path / "w.safetensors"
    header = b'{"a":{"dtype":"F32","shape":[4000000000],"data_offsets":[0,16000000000]}}'
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 16_000_000_000)
    assert tensors_in(path)["a"][1] == (4_000_000_000,)
    with WeightFiles() as files:
        assert files.read(path, "a", (slice(3_999_999_990, 4_000_000_000),)).tolist() == [0.0] * 10
