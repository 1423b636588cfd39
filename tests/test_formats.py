"""The formats against ModelOpt's own functions and ml_dtypes: bit for bit unless a test says otherwise."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dgemma_trt import formats

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.quant_utils import to_quantized_weight
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer, register_quant_backend, unregister_quant_backend
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])


def wide(seed: int, *shape: int) -> Tensor:
    """Normal numbers times powers of two over 2^-6 … 2^6 for each row, so that block scales differ widely."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-6, 7, (*shape[:-1], 1), generator=generator).float()
    return torch.randn(shape, generator=generator) * torch.exp2(exponents)


def modelopt_nvfp4(x: Tensor, global_scale: Tensor) -> Tensor:
    """ModelOpt's NVFP4 rounding for tensors on a CPU; its fake quantization of activations needs a GPU."""
    codes, scale, double_scale = NVFP4QTensor.quantize(x.clone(), 16, weights_scaling_factor_2=global_scale)
    return codes.dequantize(torch.float32, scale=scale, double_scale=double_scale, block_sizes={-1: 16})


# Elements


def test_e4m3_rounding_is_that_of_ml_dtypes():
    x = torch.cat([wide(0, 64, 64).flatten(), torch.arange(-460, 460, 0.125) / 64, torch.tensor([0.0, 2**-10, 3 * 2**-10])])
    x = x.clamp(-448, 448)
    theirs = x.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(formats._to_e4m3(x).float().numpy(), theirs)


def test_e2m1_rounding_is_that_of_ml_dtypes():
    x = torch.cat([torch.arange(-7, 7, 1 / 64), TIES, -TIES, torch.tensor([1e9, -1e9])])
    theirs = x.numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(formats._round_e2m1(x).numpy(), theirs)


def test_every_byte_unpacks_low_nibble_first():
    codes = torch.arange(256, dtype=torch.uint8)
    packed = codes.repeat_interleave(8)[:, None].view(256, 8)
    values = formats.dequantize_nvfp4(packed, torch.ones(256, 1).to(torch.float8_e4m3fn), torch.tensor(1.0))
    nibbles = np.stack([codes.numpy() & 15, codes.numpy() >> 4], -1)
    theirs = nibbles.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(values[:, :2].numpy(), theirs)


# Weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_weights_are_those_of_modelopt(dtype: torch.dtype):
    weight = wide(1, 48, 80).to(dtype)
    weight[3] = 0
    codes, scale = formats.quantize_fp8(weight)
    theirs = to_quantized_weight(weight, scale, "fp8_pc_pt")
    assert scale[3] == 1
    assert torch.equal(codes.view(torch.uint8), theirs.view(torch.uint8))
    dequantized = FP8QTensor(weight.shape, torch.float32, theirs).dequantize(scale=scale[:, None])
    assert torch.equal(formats.dequantize_fp8(codes, scale), dequantized)


def test_fp8_weights_with_one_scale():
    codes = wide(2, 3, 8, 16).to(torch.float8_e4m3fn)
    scale = torch.tensor([0.1, 0.2, 0.3])
    dequantized = formats.dequantize_fp8(codes, scale)
    for expert in range(3):
        theirs = FP8QTensor((8, 16), torch.float32, codes[expert]).dequantize(scale=scale[expert])
        assert torch.equal(dequantized[expert], theirs)
        assert torch.equal(formats.dequantize_fp8(codes[expert], scale[expert]), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_weights_are_those_of_modelopt(dtype: torch.dtype):
    weight = wide(3, 48, 80).to(dtype)
    weight[0, :16] = 0
    weight[1, :8], weight[1, 8:16] = TIES, -TIES
    weight[2, :16] = weight.abs().max() * 2.0**-30
    packed, scale, global_scale = formats.quantize_nvfp4(weight)
    theirs, their_scale, their_global = NVFP4QTensor.quantize(weight.clone(), 16)
    assert torch.equal(global_scale, their_global)
    assert torch.equal(scale.view(torch.uint8), their_scale.view(torch.uint8))
    # The code of -0 may differ in its sign, which changes no value.
    dequantized = theirs.dequantize(torch.float32, scale=their_scale, double_scale=their_global, block_sizes={-1: 16})
    assert torch.equal(formats.dequantize_nvfp4(theirs._quantized_data, their_scale, their_global), dequantized)
    assert torch.equal(formats.dequantize_nvfp4(packed, scale, global_scale), dequantized)


def test_stacked_experts_are_quantized_one_by_one():
    weight = wide(4, 5, 24, 32)
    weight[2] = 0
    codes, scale = formats.quantize_fp8(weight)
    packed, block_scale, global_scale = formats.quantize_nvfp4(weight)
    assert scale.shape == (5, 24) and global_scale.shape == (5,) and global_scale.isfinite().all()
    fp8 = formats.dequantize_fp8(codes, scale)
    nvfp4 = formats.dequantize_nvfp4(packed, block_scale, global_scale)
    for expert in range(5):
        alone = formats.quantize_nvfp4(weight[expert])
        assert torch.equal(packed[expert], alone[0]) and torch.equal(global_scale[expert], alone[2])
        assert torch.equal(nvfp4[expert], formats.dequantize_nvfp4(*alone))
        assert torch.equal(fp8[expert], formats.dequantize_fp8(*formats.quantize_fp8(weight[expert])))
    assert not nvfp4[2].any()


# Activations


def quantizer(name: str, amax: float | None = None) -> TensorQuantizer:
    """The quantizer of activations that one of ModelOpt's configurations makes."""
    config = next(entry["cfg"] for entry in getattr(mtq, name)["quant_cfg"] if entry["quantizer_name"] == "*input_quantizer")
    return TensorQuantizer(QuantizerAttributeConfig(**config), amax=amax)


@pytest.mark.parametrize("shape", [(7, 48), (2, 5, 48)])
def test_fp8_per_token_is_modelopts(shape: tuple[int, ...]):
    x = wide(5, *shape)
    x[..., 0, :] = 0
    x[..., 1, :] *= 1e-9
    assert torch.equal(formats.round_fp8_per_token(x), quantizer("FP8_PER_CHANNEL_PER_TOKEN_CFG")(x))


def test_fp8_static_is_modelopts_up_to_ties():
    x = wide(6, 400, 48)
    theirs = quantizer("FP8_DEFAULT_CFG", amax=3.7)(x)
    ours = formats.round_fp8(x, torch.tensor(3.7 / 448))
    differing = ((ours - theirs).abs() > 1e-6 * theirs.abs()).float().mean().item()
    assert differing <= 0.001, differing
    assert ours.abs().max().item() == pytest.approx(3.7, rel=1e-6)


def test_nvfp4_activations_are_modelopts():
    x = wide(7, 200, 96)
    x[0] = 0
    x[1, :16] = 0
    input_scale = torch.tensor(2.0**-4)
    x[2, :8], x[2, 8:16] = TIES, -TIES
    x[3, :8], x[3, 8:16] = TIES * 37, -TIES * 37
    x[4] = 10 * 2688 * 2.0**-4
    # ModelOpt's function for tensors on a CPU is meant for weights, whose block scales never vanish: see the next test.
    blocks = x.unflatten(-1, (-1, 16))
    x = torch.where(blocks.abs().amax(-1, keepdim=True) > 6 * 2**-13, blocks, 0).flatten(-2)
    for scale in (input_scale, torch.tensor(0.01)):
        assert torch.equal(formats.round_nvfp4(x, scale), modelopt_nvfp4(x, scale))
    assert formats.round_nvfp4(x, input_scale).abs().max() == 2688 * 2.0**-4


def test_nvfp4_blocks_whose_scale_vanishes_become_zero():
    x = torch.full((1, 48), 6 * 2.0**-10)
    x[0, 16:32] *= 1.0001
    x[0, 32:] = 0
    rounded = formats.round_nvfp4(x, torch.tensor(1.0))
    assert not rounded[0, :16].any() and not rounded[0, 32:].any()
    assert torch.equal(rounded[0, 16:32], torch.full((16,), 3 * 2.0**-9))


def test_experts_have_their_own_input_scales():
    x, scales = wide(8, 3, 5, 32), torch.tensor([0.5, 0.01, 0.002])
    for rounding in (formats.round_fp8, formats.round_nvfp4):
        rounded = rounding(x, scales)
        for expert in range(3):
            assert torch.equal(rounded[expert], rounding(x[expert], scales[expert]))


# Linear layers


def calibrated(config: str, x: Tensor, weight: Tensor) -> Any:
    """A layer with this weight as ModelOpt quantizes it after seeing x."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    model = torch.nn.Sequential(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mtq.quantize(model, getattr(mtq, config), lambda model: model(x))[0]


def share_of_differing(ours: Tensor, theirs: Tensor) -> float:
    """Elements further apart than 1e-5 of the row's largest."""
    return ((ours - theirs).abs() > 1e-5 * theirs.abs().amax(-1, keepdim=True)).float().mean().item()


def test_fp8_linear_agrees_with_modelopts():
    x, weight = wide(9, 300, 128), wide(10, 96, 128)
    theirs = calibrated("FP8_PER_CHANNEL_PER_TOKEN_CFG", x, weight)(x)
    ours = functional.linear(formats.round_fp8_per_token(x), formats.dequantize_fp8(*formats.quantize_fp8(weight)))
    assert share_of_differing(ours, theirs) <= 0.001


def test_nvfp4_linear_agrees_with_modelopts():
    x, weight = wide(11, 300, 128), wide(12, 96, 128)
    layer = calibrated("NVFP4_DEFAULT_CFG", x, weight)
    register_quant_backend("on-cpu", lambda inputs, quantizer: modelopt_nvfp4(inputs, quantizer.amax / 2688))
    try:
        layer.input_quantizer.backend = layer.weight_quantizer.backend = "on-cpu"
        theirs = layer(x)
    finally:
        unregister_quant_backend("on-cpu")
    rounded = formats.round_nvfp4(x, layer.input_quantizer.amax / 2688)
    ours = functional.linear(rounded, formats.dequantize_nvfp4(*formats.quantize_nvfp4(weight)))
    assert share_of_differing(ours, theirs) <= 0.001
