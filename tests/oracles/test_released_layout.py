"""The tiny released checkpoint as others read it: nemo-automodel's K3 adapter, and compressed-tensors' unpacking."""

import pytest
import torch

from k3lite.bench_mx import compressed_tensors_scheme
from k3lite.checkpoint import released_tensors
from k3lite.packed import unpack_experts
from tests.oracles.conftest import load
from tests.tiny_released import TINY, tensors_of, tiny_released


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("released")
    model = tiny_released(folder, dtype="bfloat16")
    tensors = tensors_of(folder)
    unpack_experts(model)
    return tensors, dict(released_tensors(model))


def test_the_adapter_reads_it(written, kimi_k3):
    """Their loader's values, under their names, are ours: prefix, padding, experts."""
    adapter_of = load("nemo_automodel.components.models.kimi_k3.state_dict_adapter").KimiK3StateDictAdapter
    tensors, ours = written

    class Config:
        linear_attn_config = TINY.to_dict()["linear_attn_config"]

    adapter = adapter_of(Config, None, None, dtype=torch.bfloat16)
    stripped = {
        adapter._strip_hf_text_prefix(n): adapter._normalize_checkpoint_tensor(n, t) for n, t in tensors.items()
    }
    adapter._dequantize_packed_experts(stripped)
    assert stripped.keys() == ours.keys()
    for name, t in stripped.items():
        assert t.dtype == ours[name].dtype and torch.equal(t, ours[name]), name


def test_compressed_tensors_unpacks_the_experts(written):
    base = load("compressed_tensors.compressors.mxfp4.base")
    scheme, compressor = compressed_tensors_scheme(base), base.MXFP4PackedCompressor
    tensors, ours = written
    count = 0
    for name in [n for n in tensors if n.endswith("weight_packed")]:
        stem = name.removesuffix("_packed")
        state = {"weight_packed": tensors[name], "weight_scale": tensors[f"{stem}_scale"]}
        got = compressor.decompress(state, scheme)["weight"]
        assert torch.equal(got, ours[stem.removeprefix("language_model.")]), name
        count += 1
    assert count == 24
