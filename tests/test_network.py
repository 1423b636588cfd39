"""What the emitted network takes and gives, and its parts against independent computations (the oracle executes them)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tensorrt_rtx as trt
import torch
from random_weights import RandomWeights, tiny_config
from torch import Tensor

from dgemma_trt.build.experts import Routing, dense_experts
from dgemma_trt.build.head import read_vocabulary
from dgemma_trt.build.layers import Dimension, Layers, Log, Node, TensorSpec
from dgemma_trt.build.matmuls import Matmuls
from dgemma_trt.build.network import Emitted, NetworkOptions, emit
from dgemma_trt.build.oracle import execute
from dgemma_trt.errors import UserError
from dgemma_trt.runtime import vocabulary
from dgemma_trt.weights import Precision

OPTIONS = NetworkOptions(max_batch=3, max_context=64, prefill_chunk=16, canvas_length=8)


def described(specs: tuple[TensorSpec, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {spec.name: (spec.dtype, spec.shape) for spec in specs}


def constant_layers(emitted: Emitted) -> list[str]:
    layers = (emitted.network.get_layer(index) for index in range(emitted.network.num_layers))
    return [layer.name for layer in layers if layer.type == trt.LayerType.CONSTANT]


class Small:
    """A network of a few layers with hidden states in float32, to be executed by the oracle."""

    def __init__(self) -> None:
        self._log = Log(trt)
        self._builder = trt.Builder(self._log.logger)
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.layers = Layers(trt, self._builder.create_network(flags), self._log, "float32")

    def input(self, name: str, dtype: str, *shape: int) -> Node:
        rows = Dimension("rows", 0, 8, 64)
        return self.layers.input(TensorSpec(name, dtype, tuple(rows if size == -1 else size for size in shape)))

    def run(self, outputs: dict[str, Node], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, node in outputs.items():
            node.name = name
            self.layers.network.mark_output(node)
        return execute(self.layers.network, trt, inputs, self.layers.constants)


# Inputs and outputs


def test_inputs_and_outputs_are_those_of_the_design() -> None:
    emitted = emit(RandomWeights(tiny_config()), OPTIONS, trt)
    request = {name: spec for name, spec in described(emitted.inputs).items() if name not in emitted.weight_inputs}
    assert request == {
        "canvas_ids": ("int32", (-1, -1)),
        "canvas_positions": ("int32", (-1, -1)),
        "soft_embeddings": ("bfloat16", (-1, -1, 64)),
        "temperature": ("float32", (-1,)),
        "uniform": ("float32", (-1, -1)),
        "context_ids": ("int32", (-1, -1)),
        "context_positions": ("int32", (-1, -1)),
        "context_slot": ("int32", (-1,)),
        "sliding_positions": ("int32", (-1, -1)),
        "full_positions": ("int32", (-1, -1)),
        "layers.0.k_cache": ("bfloat16", (-1, 2, -1, 24)),
        "layers.0.v_cache": ("bfloat16", (-1, 2, -1, 24)),
        "layers.1.k_cache": ("bfloat16", (-1, 1, -1, 40)),
        "layers.1.v_cache": ("bfloat16", (-1, 1, -1, 40)),
    }
    assert described(emitted.outputs) == {
        "layers.0.k_new": ("bfloat16", (-1, 2, -1, 24)),
        "layers.0.v_new": ("bfloat16", (-1, 2, -1, 24)),
        "layers.1.k_new": ("bfloat16", (-1, 1, -1, 40)),
        "layers.1.v_new": ("bfloat16", (-1, 1, -1, 40)),
        "best_ids": ("int32", (-1, -1)),
        "sampled_ids": ("int32", (-1, -1)),
        "entropy": ("float32", (-1, -1)),
        "best_logprob": ("float32", (-1, -1)),
        "next_soft_embeddings": ("bfloat16", (-1, -1, 64)),
    }
    network = emitted.network
    assert [spec.name for spec in emitted.inputs] == [network.get_input(i).name for i in range(network.num_inputs)]
    assert [spec.name for spec in emitted.outputs] == [network.get_output(i).name for i in range(network.num_outputs)]
    for index, spec in enumerate(emitted.outputs):
        assert network.get_output(index).dtype == getattr(trt, spec.dtype), spec.name
        assert tuple(network.get_output(index).shape) == spec.shape, spec.name
    assert not emitted.log.errors and not emitted.log.warnings


def test_outputs_on_request() -> None:
    emitted = emit(RandomWeights(tiny_config()), replace(OPTIONS, top_logprobs=True, debug_logits=True), trt)
    outputs = described(emitted.outputs)
    assert outputs["top_ids"] == ("int32", (-1, -1, 20))
    assert outputs["top_logprobs"] == ("float32", (-1, -1, 20))
    assert outputs["logits"] == ("float32", (-1, -1, 199))


def test_both_groups_and_the_caches_may_be_empty() -> None:
    emitted = emit(RandomWeights(tiny_config()), OPTIONS, trt)
    specs = {spec.name: spec for spec in emitted.inputs}
    assert specs["canvas_ids"].minimum == (1, 0) and specs["canvas_ids"].maximum == (3, 8)
    assert specs["context_ids"].minimum == (0, 0) and specs["context_ids"].maximum == (3, 16)
    assert specs["layers.0.k_cache"].minimum == (1, 2, 0, 24) and specs["layers.0.k_cache"].maximum == (3, 2, 16, 24)
    assert specs["layers.1.v_cache"].minimum == (1, 1, 0, 40) and specs["layers.1.v_cache"].maximum == (3, 1, 64, 40)
    for spec in specs.values():
        assert all(low <= usual <= high for low, usual, high in zip(spec.minimum, spec.optimum, spec.maximum, strict=True))


def test_a_chunk_may_be_as_long_as_a_canvas() -> None:
    emitted = emit(RandomWeights(tiny_config()), replace(OPTIONS, prefill_chunk=4), trt)
    assert next(spec for spec in emitted.inputs if spec.name == "context_ids").maximum == (3, 8)


def test_a_model_without_sliding_layers_takes_no_sliding_positions() -> None:
    emitted = emit(RandomWeights(tiny_config(layer_types=["full_attention"] * 2)), OPTIONS, trt)
    assert "sliding_positions" not in described(emitted.inputs)


# Weights


@pytest.mark.parametrize("precision", Precision)
def test_weight_inputs_are_the_stored_tensors(precision: Precision) -> None:
    weights = RandomWeights(tiny_config(), precision)
    emitted = emit(weights, OPTIONS, trt)
    inputs = described(emitted.inputs)
    packed = precision in (Precision.NVFP4, Precision.NVFP4_WEIGHTS)
    weight = {"bf16": "bfloat16", "fp8": "fp8", "fp8-static": "fp8"}.get(precision, "fp4")
    assert inputs["embed_tokens"] == ("bfloat16", (199, 64))
    assert inputs["layers.0.router.proj"] == ("bfloat16", (6, 64))
    assert inputs["layers.0.mlp.down_proj.weight"] == (weight, (64, 80))
    assert inputs["layers.1.experts.gate_proj.weight"] == (weight, (6, 48, 64))
    scale = {Precision.FP8: ("float32", (6, 48))}.get(precision, ("fp8", (6, 48, 4)) if packed else None)
    assert inputs.get("layers.1.experts.gate_proj.weight_scale") == scale
    assert set(emitted.weight_inputs) == {name for name in inputs if "proj" in name or name == "embed_tokens"}
    assert "layers.1.self_attn.v_proj.weight" not in inputs


def test_values_of_weights_that_are_inputs_are_not_read() -> None:
    weights = RandomWeights(tiny_config(), Precision.NVFP4)
    for name, stored in weights.linears.items():
        assert stored.weight_scale is not None
        weights.linears[name] = replace(stored, weight=stored.weight.to("meta"), weight_scale=stored.weight_scale.to("meta"))
    weights.tensors["embed_tokens"] = weights.tensors["embed_tokens"].to("meta")
    emit(weights, OPTIONS, trt)


@pytest.mark.parametrize("embed", [False, True])
def test_every_constant_can_be_read_back(embed: bool) -> None:
    weights = RandomWeights(tiny_config(), Precision.NVFP4)
    emitted = emit(weights, replace(OPTIONS, embed_weights=embed), trt)
    names = constant_layers(emitted)
    assert len(names) == len(set(names)) and set(names) == emitted.constants.keys()
    assert bool(emitted.weight_inputs) is not embed
    if embed:
        stored = weights.linears["layers.0.experts.up_proj"]
        assert torch.equal(emitted.constants["layers.0.experts.up_proj.weight"], stored.weight)


def test_layer_names_are_unique() -> None:
    network = emit(RandomWeights(tiny_config()), OPTIONS, trt).network
    names = [network.get_layer(index).name for index in range(network.num_layers)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("precision", [Precision.FP8_STATIC, Precision.NVFP4])
def test_experts_with_different_input_scales_are_refused(precision: Precision) -> None:
    weights = RandomWeights(tiny_config(), precision)
    name = "layers.1.experts.down_proj"
    weights.linears[name] = replace(weights.linears[name], input_scale=torch.tensor([0.1, 0.1, 0.2, 0.1, 0.1, 0.1]))
    with pytest.raises(UserError, match=r"layers\.1\.experts\.down_proj: .* from 0\.1 to 0\.2"):
        emit(weights, OPTIONS, trt)


# Matmuls and experts


@pytest.mark.parametrize("precision", Precision)
def test_matmuls_compute_what_the_weight_means(precision: Precision) -> None:
    weights = RandomWeights(tiny_config(), precision)
    small = Small()
    matmuls = Matmuls(small.layers, weights, embed=True)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    x[3] = 0
    node = small.input("x", "float32", -1, 64)
    names = ["layers.0.mlp.gate_proj", "layers.0.experts.gate_proj"]
    single = matmuls.linear(node, names[0])
    stacked = matmuls.linear(small.layers.unsqueeze(node, [0]), names[1])
    found = small.run({"single": single, "stacked": stacked}, {"x": x})
    for output, stored in zip(found.values(), map(weights.linear, names), strict=True):
        matrices = [stored] if stored.weight.ndim == 2 else [stored.expert(index) for index in range(len(stored.weight))]
        expected = torch.stack([matrix.round_input(x) @ matrix.dequantize().T for matrix in matrices])
        torch.testing.assert_close(output, expected.reshape(output.shape), rtol=1e-5, atol=1e-4)


def test_an_expert_that_was_not_chosen_leaves_no_trace() -> None:
    weights = RandomWeights(tiny_config())
    name = "layers.0.experts"
    weights.linears[f"{name}.down_proj"].weight[0] = float("nan")
    small = Small()
    matmuls = Matmuls(small.layers, weights, embed=True)
    routing = Routing(small.input("weights", "float32", -1, 2), small.input("chosen", "int32", -1, 2))
    out = dense_experts(small.layers, matmuls, small.input("x", "float32", -1, 64), routing, name, 6)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([[1, 4], [0, 2], [5, 1]], dtype=torch.int32)
    share = torch.tensor([[0.7, 0.3], [0.5, 0.5], [1.5, -0.25]])
    (found,) = small.run({"out": out}, {"x": x, "chosen": chosen, "weights": share}).values()
    assert found[1].isnan().all()
    for row in (0, 2):
        expected = sum(w * one_expert(weights, name, int(e), x[row]) for w, e in zip(share[row], chosen[row], strict=True))
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-3)


def one_expert(weights: RandomWeights, name: str, index: int, x: Tensor) -> Tensor:
    gate, up, down = (weights.linear(f"{name}.{kind}").weight[index].float() for kind in ("gate_proj", "up_proj", "down_proj"))
    return (torch.nn.functional.gelu(x @ gate.T, approximate="tanh") * (x @ up.T)) @ down.T


# The vocabulary head


@pytest.mark.parametrize("words", [5, 199, 512, 1500])
def test_the_head_reads_what_the_host_session_reads(words: int) -> None:
    generator = torch.Generator().manual_seed(words)
    z = torch.randn(64, words, generator=generator) * torch.tensor([0.0, 0.3, 3.0, 30.0]).repeat(16)[:, None]
    z[5, words - 2 :] = z[5].max() + 1  # two equal maxima
    uniform = torch.rand(64, generator=generator)
    uniform[:8] = 0.0
    uniform[8:16] = 1 - 2.0**-24
    small = Small()
    seen = read_vocabulary(small.layers, small.input("z", "float32", -1, words), small.input("uniform", "float32", -1, 1))
    outputs = {
        "best": seen.best_ids,
        "sampled": seen.sampled_ids,
        "entropy": seen.entropy,
        "logprob": seen.best_logprob,
        "p": seen.probabilities,
    }
    found = small.run(outputs, {"z": z, "uniform": uniform[:, None]})
    expected = vocabulary.read_vocabulary(z, uniform)
    first = (z == z.max(dim=-1, keepdim=True).values).int().argmax(-1)
    assert torch.equal(found["best"].long(), first)
    probabilities = expected.probabilities / expected.total[:, None]
    torch.testing.assert_close(found["p"], probabilities, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found["entropy"], expected.entropy, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found["logprob"], expected.best_logprob, rtol=1e-5, atol=2e-6)
    # A draw may differ where it falls within rounding of a boundary between two words.
    running = probabilities.double().cumsum(-1)
    for row in (found["sampled"].long() != expected.sampled_ids).nonzero().flatten():
        assert (running[row] - uniform[row]).abs().min() < 1e-5
    assert (found["p"].gather(1, found["sampled"].long()[:, None]) > 0).all()
