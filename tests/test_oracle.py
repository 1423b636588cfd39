"""The oracle, layer by layer: real networks, against numbers worked out by hand, numpy, scipy or ml_dtypes."""

import weakref

import ml_dtypes
import numpy as np
import pytest
import scipy.special
import torch

from dgemma_trt.build import oracle, oracle_formats
from dgemma_trt.build.layers import Log
from dgemma_trt.build.oracle import OracleError, execute
from dgemma_trt.build.oracle_layers import LAYERS

trt = pytest.importorskip("tensorrt_rtx")

BUILDER = trt.Builder(Log(trt).logger)
TYPES = {
    torch.float32: trt.float32,
    torch.float16: trt.float16,
    torch.bfloat16: trt.bfloat16,
    torch.int32: trt.int32,
    torch.int64: trt.int64,
    torch.bool: trt.bool,
    torch.float8_e4m3fn: trt.fp8,
    torch.uint8: trt.fp4,
}
NONE, TRANSPOSE, VECTOR = trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE, trt.MatrixOperation.VECTOR


class Net:
    """A network in the making, with the values of its inputs and constants."""

    def __init__(self):
        self.network = BUILDER.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        self.inputs, self.constants, self._alive = {}, {}, []

    def __getattr__(self, name):
        return getattr(self.network, name)

    def input(self, value, shape=None, name=None):
        """An input that holds `value`; `shape` where some of it is dynamic."""
        name = name or f"x{len(self.inputs)}"
        self.inputs[name] = value
        logical = (*value.shape[:-1], 2 * value.shape[-1]) if value.dtype == torch.uint8 else tuple(value.shape)
        return self.network.add_input(name, TYPES[value.dtype], shape or logical)

    def const(self, value, dtype=None):
        """A constant from a number, an array or a tensor, whose bytes the oracle gets where they cannot be read back."""
        value = torch.as_tensor(value, dtype=dtype).contiguous()
        fp4 = value.dtype == torch.uint8
        shape = (*value.shape[:-1], 2 * value.shape[-1]) if fp4 else tuple(value.shape)
        self._alive.append(value)
        weights = trt.Weights(TYPES[value.dtype], value.data_ptr(), int(np.prod(shape)))
        layer = self.network.add_constant(shape, weights)
        layer.name = f"constant {self.network.num_layers}"
        self.constants[layer.name] = value
        return layer.get_output(0)

    def run(self, *layers):
        """The first outputs of layers, marked as the network's; or what is marked already."""
        for layer in layers:
            tensor = layer if isinstance(layer, trt.ITensor) else layer.get_output(0)
            tensor.name = f"y{self.network.num_outputs}"
            self.network.mark_output(tensor)
        got = list(execute(self.network, trt, self.inputs, self.constants).values())
        return got[0] if len(got) == 1 else got


def close(got, wanted, dtype=torch.float32, tolerance=1e-6):
    """Equal in type and shape, and in value to within a few roundings."""
    assert got.dtype == dtype
    wanted = np.asarray(wanted)
    assert tuple(got.shape) == wanted.shape
    np.testing.assert_allclose(got.float().numpy(), wanted.astype(np.float32), rtol=tolerance, atol=tolerance)


def same(got, wanted):
    """Equal in type, shape and every bit that counts."""
    wanted = torch.as_tensor(wanted)
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    np.testing.assert_array_equal(got.float().numpy(), wanted.float().numpy())


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bf16(values):
    """What numpy values are in bf16, as float32, rounded by ml_dtypes."""
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def fp8(values):
    """What numpy values are in e4m3fn, saturated, as float32, rounded by ml_dtypes."""
    return np.clip(np.asarray(values, np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def fp4(values):
    """What numpy values are in E2M1, saturated, as float32, rounded by ml_dtypes."""
    return np.clip(np.asarray(values, np.float32), -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)


# --- formats ----------------------------------------------------------------------------------------------------------


def test_fp8_rounds_as_ml_dtypes():
    halves = torch.arange(0, 1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    values = torch.cat([halves, normal(20000, seed=1) * 100])
    got = oracle_formats.to_fp8(values).float().numpy()
    np.testing.assert_array_equal(got, fp8(values.numpy()))


def test_fp4_rounds_as_ml_dtypes():
    values = torch.cat(
        [torch.arange(-8, 8, 1 / 64), torch.nextafter(torch.arange(-7, 7, 1 / 4), torch.tensor(9.0)), normal(9999)]
    )
    codes = oracle_formats.to_fp4(values)
    wanted = np.clip(values.numpy(), -6, 6).astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(oracle_formats.from_fp4(codes).numpy(), wanted.astype(np.float32))
    np.testing.assert_array_equal(codes.numpy(), wanted.view(np.uint8))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5])
    assert oracle_formats.from_fp4(oracle_formats.to_fp4(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4, -2]


def test_fp4_packs_the_low_nibble_first():
    assert oracle_formats.unpack_fp4(torch.tensor([[0x21, 0x43]], dtype=torch.uint8)).tolist() == [[1, 2, 3, 4]]
    codes = torch.randint(0, 16, (3, 8), dtype=torch.uint8)
    same(oracle_formats.unpack_fp4(oracle_formats.pack_fp4(codes)), codes)


# --- types and shapes -------------------------------------------------------------------------------------------------


def test_constants_are_read_back_or_given():
    net = Net()
    values = normal(4, 32)
    codes = torch.arange(64, dtype=torch.uint8).reshape(2, 32)
    read = net.const(values)
    rounded = net.const(values.bfloat16())
    eight = net.const(values.to(torch.float8_e4m3fn))
    four = net.const(codes)
    one = net.const(1.0)
    scales = net.const(torch.ones(2, 4))
    blocked = net.add_dequantize(four, scales, trt.float32)
    blocked.axis = 1
    net.constants = {
        name: bytes(v.reshape(-1).view(torch.uint8).tolist()) for name, v in net.constants.items() if v.dtype.itemsize < 4
    }
    got = net.run(read, rounded, net.add_dequantize(eight, one, trt.float32), blocked)
    close(got[0], values)
    close(got[1], bf16(values), torch.bfloat16)
    close(got[2], fp8(values))
    low, high = codes & 15, codes >> 4
    unpacked = np.stack([low, high], -1).reshape(2, 64).astype(np.uint8)
    close(got[3], unpacked.view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    net.constants.clear()
    with pytest.raises(OracleError, match=r"constant 2.*cannot be read back"):
        net.run()


def test_cast():
    net = Net()
    x = net.input(torch.tensor([-1.7, -0.0, 0.3, 1.00390625, 2.9]))
    got = net.run(net.add_cast(x, trt.int32), net.add_cast(x, trt.bool), net.add_cast(x, trt.bfloat16), net.add_identity(x))
    same(got[0], torch.tensor([-1, 0, 0, 1, 2], dtype=torch.int32))
    same(got[1], torch.tensor([True, False, True, True, True]))
    close(got[2], bf16([-1.7, -0.0, 0.3, 1.00390625, 2.9]), torch.bfloat16)
    assert got[2][3] == 1  # a tie, to even
    close(got[3], net.inputs["x0"])
    net = Net()
    with pytest.raises(OracleError, match="quantize instead"):
        net.run(net.add_cast(net.input(torch.ones(2)), trt.fp8))


def shuffled(net, x, **attributes):
    layer = net.add_shuffle(x)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def test_shuffle_transposes_reshapes_and_transposes():
    net, values = Net(), normal(2, 3, 4)
    x = net.input(values, (2, -1, 4))
    layer = shuffled(net, x, first_transpose=(1, 2, 0), reshape_dims=(0, -1), second_transpose=(1, 0))
    wanted = np.transpose(values.numpy(), (1, 2, 0)).reshape(3, 8).T
    close(net.run(layer), wanted)
    layer.first_transpose = (1, 0, 2)
    assert not np.allclose(net.run().numpy(), wanted)


def test_shuffle_by_an_input():
    net = Net()
    values, shape = normal(2, 6), net.input(torch.tensor([3, 4], dtype=torch.int64), name="shape")
    layer = net.add_shuffle(net.input(values))
    layer.set_input(1, shape)
    close(net.run(layer), values.numpy().reshape(3, 4))


def test_shuffle_of_nothing():
    net = Net()
    x = net.input(torch.zeros(1, 0, 2, 4), (1, -1, 2, 4))
    kept = shuffled(net, x, reshape_dims=(0, 0, -1), second_transpose=(1, 2, 0))
    emptied = shuffled(net, x, reshape_dims=(0, 4), zero_is_placeholder=False)
    got = net.run(kept, emptied)
    assert [g.shape for g in got] == [(0, 8, 1), (0, 4)]
    net = Net()
    unclear = shuffled(net, net.input(torch.zeros(2, 0), (-1, -1)), reshape_dims=(0, 0, -1))
    net.run(unclear)
    net = Net()
    unclear = shuffled(net, net.input(torch.zeros(2, 0, 3), (-1, -1, -1)), reshape_dims=(0, 0, 1, -1))
    with pytest.raises(OracleError, match="cannot infer"):
        net.run(unclear)


def test_squeeze_and_unsqueeze():
    net, values = Net(), normal(1, 3, 1)
    x = net.input(values, (1, -1, 1))
    axes = net.const([0], torch.int64)
    got = net.run(
        net.add_squeeze(x, axes), net.add_squeeze(x), net.add_unsqueeze(x, net.const([1, -1], torch.int64)), net.add_shape(x)
    )
    assert [g.shape for g in got[:3]] == [(3, 1), (3,), (1, 1, 3, 1, 1)]
    same(got[3], torch.tensor([1, 3, 1]))
    net.inputs["x0"] = values[:, :1]
    assert net.run()[1].shape == (1,)  # only what is 1 in the network goes


def test_concatenation_along_an_axis_some_of_it_empty():
    net = Net()
    parts = [normal(2, n, 3, dtype=torch.bfloat16) for n in (0, 2, 1)]
    layer = net.add_concatenation([net.input(p, (2, -1, 3)) for p in parts])
    layer.axis = 1
    close(net.run(layer), np.concatenate([p.float().numpy() for p in parts], 1), torch.bfloat16)


def test_fill():
    net = Net()
    static = net.add_fill((4,), trt.FillOperation.LINSPACE, trt.float32)
    static.alpha, static.beta = 0.5, 2.0
    dynamic = net.add_fill((), trt.FillOperation.LINSPACE, trt.int32)
    for index, value in enumerate(([2, 3], 7, [10, 1])):
        dynamic.set_input(index, net.const(value, torch.int64 if index == 0 else torch.int32))
    got = net.run(static, dynamic)
    close(got[0], [0.5, 2.5, 4.5, 6.5])
    same(got[1], torch.tensor([[7, 8, 9], [17, 18, 19]], dtype=torch.int32))
    static.beta = 3.0
    close(net.run()[0], [0.5, 3.5, 6.5, 9.5])


def test_assertion():
    net = Net()
    x = net.input(torch.tensor([True, True]))
    net.add_assertion(x, "must hold")
    net.run(net.add_unary(x, trt.UnaryOperation.NOT))
    net.inputs["x0"] = torch.tensor([True, False])
    with pytest.raises(OracleError, match="must hold"):
        net.run()


# --- arithmetic -------------------------------------------------------------------------------------------------------

OPERATIONS = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "SUB": np.subtract,
    "DIV": np.divide,
    "POW": np.power,
    "FLOOR_DIV": np.floor_divide,
    "EQUAL": np.equal,
    "GREATER": np.greater,
    "LESS": np.less,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", OPERATIONS)
def test_elementwise_floating_point(op, dtype):
    net = Net()
    a, b = normal(2, 1, 5, dtype=dtype).abs(), normal(1, 3, 5, seed=1, dtype=dtype)
    b[0, 0] = a[0, 0]
    layer = net.add_elementwise(net.input(a), net.input(b), getattr(trt.ElementWiseOperation, op))
    got, wanted = net.run(layer), OPERATIONS[op](a.float().numpy(), b.float().numpy())
    if wanted.dtype == bool:
        same(got, wanted)
    else:
        close(got, bf16(wanted) if dtype == torch.bfloat16 else wanted, dtype)


@pytest.mark.parametrize("op", [op for op in OPERATIONS if op not in ("DIV", "POW")])
def test_elementwise_integers(op):
    net = Net()
    a, b = torch.tensor([7, -7, 3, 0], dtype=torch.int32), torch.tensor([2, 2, 3, -4], dtype=torch.int32)
    layer = net.add_elementwise(net.input(a), net.input(b), getattr(trt.ElementWiseOperation, op))
    same(net.run(layer), OPERATIONS[op](a.numpy(), b.numpy()))
    layer.op = trt.ElementWiseOperation.DIV
    if op == "FLOOR_DIV":
        assert net.run().tolist() == [3, -3, 1, 0]


def test_elementwise_bool():
    net = Net()
    a, b = net.input(torch.tensor([0, 0, 1, 1]).bool()), net.input(torch.tensor([0, 1, 0, 1]).bool())
    got = net.run(*(net.add_elementwise(a, b, getattr(trt.ElementWiseOperation, op)) for op in ("AND", "OR", "XOR")))
    assert [g.int().tolist() for g in got] == [[0, 0, 0, 1], [0, 1, 1, 1], [0, 1, 1, 0]]


UNARY = {
    "EXP": np.exp,
    "LOG": np.log,
    "SQRT": np.sqrt,
    "RECIP": np.reciprocal,
    "ABS": np.abs,
    "NEG": np.negative,
    "SIN": np.sin,
    "COS": np.cos,
    "TAN": np.tan,
    "SINH": np.sinh,
    "COSH": np.cosh,
    "ASIN": np.arcsin,
    "ACOS": np.arccos,
    "ATAN": np.arctan,
    "ASINH": np.arcsinh,
    "ACOSH": np.arccosh,
    "ATANH": np.arctanh,
    "CEIL": np.ceil,
    "FLOOR": np.floor,
    "ERF": scipy.special.erf,
    "SIGN": np.sign,
    "ROUND": np.round,
    "ISINF": np.isinf,
    "ISNAN": np.isnan,
}


@pytest.mark.parametrize("op", UNARY)
def test_unary(op):
    net = Net()
    values = {
        "ACOSH": [1.0, 1.5, 30.0],
        "ISINF": [1.0, np.inf, np.nan],
        "ISNAN": [1.0, np.inf, np.nan],
        "ROUND": [0.5, 1.5, -2.5],
    }
    x = torch.tensor(values.get(op, [0.01, 0.4, 0.9]))
    layer = net.add_unary(net.input(x), getattr(trt.UnaryOperation, op))
    got, wanted = net.run(layer), UNARY[op](x.numpy())
    if wanted.dtype == bool:
        same(got, wanted)
    else:
        close(got, wanted)


def test_unary_of_bf16_rounds_once():
    net = Net()
    x = normal(100, dtype=torch.bfloat16)
    layer = net.add_unary(net.input(x), trt.UnaryOperation.EXP)
    close(net.run(layer), bf16(np.exp(x.float().numpy())), torch.bfloat16)
    layer.op = trt.UnaryOperation.SIN
    close(net.run(), bf16(np.sin(x.float().numpy())), torch.bfloat16)


A, B = 0.7, 1.3
ACTIVATIONS = {
    "RELU": lambda x: np.maximum(x, 0),
    "SIGMOID": scipy.special.expit,
    "TANH": np.tanh,
    "LEAKY_RELU": lambda x: np.where(x >= 0, x, A * x),
    "ELU": lambda x: np.where(x >= 0, x, A * (np.exp(x) - 1)),
    "SELU": lambda x: np.where(x > 0, B * x, B * (A * np.exp(x) - A)),
    "SOFTSIGN": lambda x: x / (1 + np.abs(x)),
    "SOFTPLUS": lambda x: A * np.log(np.exp(B * x) + 1),
    "CLIP": lambda x: np.maximum(A, np.minimum(B, x)),
    "HARD_SIGMOID": lambda x: np.maximum(0, np.minimum(1, A * x + B)),
    "SCALED_TANH": lambda x: A * np.tanh(B * x),
    "THRESHOLDED_RELU": lambda x: np.where(x > A, x, 0),
    "GELU_ERF": lambda x: 0.5 * x * (1 + scipy.special.erf(np.sqrt(0.5) * x)),
    "GELU_TANH": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (0.044715 * x**3 + x))),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation(kind):
    net, x = Net(), torch.linspace(-4, 4, 41)
    layer = net.add_activation(net.input(x), getattr(trt.ActivationType, kind))
    layer.alpha, layer.beta = A, B
    close(net.run(layer), ACTIVATIONS[kind](x.double().numpy()))
    other = "TANH" if kind != "TANH" else "RELU"
    layer.type = getattr(trt.ActivationType, other)
    close(net.run(), ACTIVATIONS[other](x.double().numpy()))


def test_parametric_relu_and_select():
    net = Net()
    x = net.input(torch.tensor([[-2.0, 3.0], [-4.0, 5.0]]))
    slope = net.const([[0.5, 0.1]], torch.float32)
    condition = net.input(torch.tensor([[True], [False]]))
    nan = net.const([[np.nan, 1.0], [np.nan, 2.0]], torch.float32)
    got = net.run(net.add_parametric_relu(x, slope), net.add_select(condition, x, nan))
    close(got[0], [[-1, 3], [-2, 5]])
    np.testing.assert_array_equal(got[1].numpy(), np.array([[-2, 3], [np.nan, 2]], np.float32))


# --- over an axis -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "reduce"), [("SUM", np.sum), ("PROD", np.prod), ("MAX", np.max), ("MIN", np.min), ("AVG", np.mean)]
)
def test_reduce(op, reduce):
    net, values = Net(), normal(2, 3, 4)
    layer = net.add_reduce(net.input(values), getattr(trt.ReduceOperation, op), 0b101, True)
    close(net.run(layer), reduce(values.numpy(), (0, 2), keepdims=True))
    layer.axes = 0b011
    layer.keep_dims = False
    close(net.run(), reduce(values.numpy(), (0, 1)))


def test_reduce_over_nothing():
    net = Net()
    x, i = net.input(torch.zeros(2, 0), (2, -1)), net.input(torch.zeros(0, dtype=torch.int32), (-1,))
    ops = [
        trt.ReduceOperation.SUM,
        trt.ReduceOperation.PROD,
        trt.ReduceOperation.MAX,
        trt.ReduceOperation.MIN,
        trt.ReduceOperation.AVG,
    ]
    got = net.run(*(net.add_reduce(x, op, 2, False) for op in ops), *(net.add_reduce(i, op, 1, True) for op in ops[:4]))
    np.testing.assert_array_equal([g[0] for g in got[:5]], [0, 1, -np.inf, np.inf, np.nan])
    assert [int(g) for g in got[5:]] == [0, 1, -(2**31), 2**31 - 1]
    assert got[5].dtype == torch.int32


def test_reduce_of_bf16_accumulates_in_float32():
    net = Net()
    values = torch.cat([torch.tensor([256.0]), torch.ones(64)]).bfloat16()
    layer = net.add_reduce(net.input(values), trt.ReduceOperation.SUM, 1, True)
    assert net.run(layer).item() == 320  # 256 + 1 is 256 in bf16


def test_softmax():
    net, values = Net(), normal(2, 3, 4) * 5
    layer = net.add_softmax(net.input(values))
    layer.axes = 4
    close(net.run(layer), scipy.special.softmax(values.numpy(), 2))
    layer.axes = 2
    close(net.run(), scipy.special.softmax(values.numpy(), 1))
    net = Net()
    rounded = values.bfloat16()
    layer = net.add_softmax(net.input(rounded))
    layer.axes = 4
    close(net.run(layer), bf16(scipy.special.softmax(rounded.float().numpy(), 2)), torch.bfloat16)


@pytest.mark.parametrize("op", ["MAX", "MIN"])
@pytest.mark.parametrize("k", [1, 4])
def test_topk_of_ties_takes_the_lowest_index(op, k):
    net = Net()
    values = torch.randint(0, 4, (3, 50), generator=torch.Generator().manual_seed(0)).float()
    layer = net.add_topk(net.input(values), getattr(trt.TopKOperation, op), k, 2)
    got = net.run(layer, layer.get_output(1))
    order = np.argsort(-values.numpy() if op == "MAX" else values.numpy(), axis=1, kind="stable")[:, :k]
    close(got[0], np.take_along_axis(values.numpy(), order, 1))
    same(got[1], order.astype(np.int32))
    layer.axes = 1
    order = np.argsort(-values.numpy() if op == "MAX" else values.numpy(), axis=0, kind="stable")[:1]
    if k == 1:
        same(net.run()[1], order.astype(np.int32))


def test_topk_with_k_as_input():
    net = Net()
    layer = net.add_topk(net.input(torch.tensor([[3.0, 1.0, 2.0]])), trt.TopKOperation.MAX, 3, 2)
    layer.set_input(1, net.const(2, torch.int32))
    got = net.run(layer, layer.get_output(1))
    assert [g.tolist() for g in got] == [[[3, 2]], [[0, 2]]]


@pytest.mark.parametrize(
    ("exclusive", "reverse", "wanted"),
    [(False, False, [1, 3, 6]), (True, False, [0, 1, 3]), (False, True, [6, 5, 3]), (True, True, [5, 3, 0])],
)
def test_cumulative(exclusive, reverse, wanted):
    net = Net()
    x = net.input(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]]), (2, -1))
    net.run(net.add_cumulative(x, net.const(1, torch.int32), trt.CumulativeOperation.SUM, exclusive, reverse))
    close(net.run()[0], wanted)
    net.inputs["x0"] = torch.zeros(2, 0)
    assert net.run().shape == (2, 0)


def test_normalization():
    net, values = Net(), normal(2, 3, 8)
    scale, bias = normal(1, 1, 8, seed=1), normal(1, 1, 8, seed=2)
    layer = net.add_normalization_v2(net.input(values), net.const(scale), net.const(bias), 4)
    layer.epsilon = 0.1
    x = values.numpy()
    wanted = (x - x.mean(2, keepdims=True)) / np.sqrt(x.var(2, keepdims=True) + 0.1) * scale.numpy() + bias.numpy()
    close(net.run(layer), wanted)
    layer.epsilon = 0.2
    assert not np.allclose(net.run().numpy(), wanted)


# --- moving elements --------------------------------------------------------------------------------------------------


def test_slice():
    net, values = Net(), normal(4, 6)
    x = net.input(values, (-1, 6))
    layer = net.add_slice(x, (1, 5), (2, 3), (2, -2))
    subset = net.add_slice(x, (1,), (3,), (1,))
    subset.axes = (-1,)
    got = net.run(layer, subset)
    close(got[0], values.numpy()[1::2, 5::-2])
    close(got[1], values.numpy()[:, 1:4])
    layer.start = (0, 5)
    close(net.run()[0], values.numpy()[0:4:2, 5::-2])
    layer.start = (2, 5)
    with pytest.raises(OracleError, match="beyond 4"):
        net.run()


def test_slice_by_inputs():
    net, values = Net(), normal(4, 6, dtype=torch.bfloat16)
    layer = net.add_slice(net.input(values), (0, 0), (0, 0), (1, 1))
    layer.set_input(1, net.input(torch.tensor([1, 2], dtype=torch.int32), name="start"))
    layer.set_input(2, net.input(torch.tensor([2, 3], dtype=torch.int32), name="size"))
    close(net.run(layer), values[1:3, 2:5].float().numpy(), torch.bfloat16)
    net.inputs["size"] = torch.tensor([0, 3], dtype=torch.int32)
    assert net.run().shape == (0, 3)


@pytest.mark.parametrize(
    ("mode", "numpy_mode"), [("WRAP", "wrap"), ("CLAMP", "edge"), ("REFLECT", "reflect"), ("FILL", "constant")]
)
def test_slice_beyond_the_input(mode, numpy_mode):
    net, values = Net(), normal(3, 4)
    layer = net.add_slice(net.input(values), (-2, -1), (7, 6), (1, 1))
    layer.mode = getattr(trt.SampleMode, mode)
    padding, keywords = ((2, 2), (1, 1)), {}
    if mode == "FILL":
        # The constant comes after the slice, so that the network's order is not one to execute in.
        layer.set_input(4, net.const(-7.0))
        keywords = {"constant_values": -7}
    close(net.run(layer), np.pad(values.numpy(), padding, mode=numpy_mode, **keywords))


def test_slice_fills_from_nothing():
    net = Net()
    layer = net.add_slice(net.input(torch.zeros(0, 2), (-1, 2)), (0, 0), (3, 2), (1, 1))
    layer.mode = trt.SampleMode.FILL
    layer.set_input(4, net.const(5.0))
    close(net.run(layer), np.full((3, 2), 5))


def test_padding_grows_and_trims():
    net, values = Net(), normal(1, 2, 3, 4)
    layer = net.add_padding_nd(net.input(values), (1, -1), (0, 2))
    close(net.run(layer), np.pad(values.numpy()[..., 1:], ((0, 0), (0, 0), (1, 0), (0, 2))))
    layer.pre_padding_nd = (0, -1)
    assert net.run().shape == (1, 2, 3, 5)


def test_gather():
    net, values = Net(), normal(3, 4, 5)
    x, indices = net.input(values), net.input(torch.tensor([[0, 2], [1, 0]], dtype=torch.int32), (-1, 2), name="i")
    layer = net.add_gather(x, indices, 1)
    close(net.run(layer), np.take(values.numpy(), [[0, 2], [1, 0]], axis=1))
    layer.axis = 2
    close(net.run(), np.take(values.numpy(), [[0, 2], [1, 0]], axis=2))
    net.inputs["i"] = torch.zeros(0, 2, dtype=torch.int32)
    assert net.run().shape == (3, 4, 0, 2)
    net.inputs["i"] = torch.tensor([[0, -1]], dtype=torch.int32)
    with pytest.raises(OracleError, match="beyond"):
        net.run()


def test_gather_with_an_elementwise_dimension():
    net, values = Net(), normal(2, 4, 3)
    layer = net.add_gather(net.input(values), net.input(torch.tensor([[3, 0], [1, 1]], dtype=torch.int32)), 1)
    layer.num_elementwise_dims = 1
    close(net.run(layer), np.stack([values[0].numpy()[[3, 0]], values[1].numpy()[[1, 1]]]))
    net = Net()
    indices = net.input(torch.zeros(0, 2, dtype=torch.int32), (-1, 2))
    layer = net.add_gather(net.input(values[:0], (-1, 4, 3)), indices, 1)
    layer.num_elementwise_dims = 1
    assert net.run(layer).shape == (0, 2, 3)


def test_gather_elements():
    net, values = Net(), normal(3, 4)
    indices = torch.tensor([[0, 2, 1, 0], [1, 1, 0, 2]], dtype=torch.int32)
    layer = net.add_gather_v2(net.input(values), net.input(indices), trt.GatherMode.ELEMENT)
    close(net.run(layer), np.take_along_axis(values.numpy(), indices.numpy(), 0))


def test_gather_nd():
    net, values = Net(), normal(2, 3, 4)
    x = net.input(values)
    whole = net.add_gather_v2(x, net.input(torch.tensor([[1, 2], [0, 0], [1, 0]], dtype=torch.int32)), trt.GatherMode.ND)
    batched = net.add_gather_v2(x, net.input(torch.tensor([[[2], [0]], [[1], [1]]], dtype=torch.int32)), trt.GatherMode.ND)
    batched.num_elementwise_dims = 1
    got, v = net.run(whole, batched), values.numpy()
    close(got[0], v[[1, 0, 1], [2, 0, 0]])
    close(got[1], np.stack([v[0][[2, 0]], v[1][[1, 1]]]))


def test_moving_fp8_and_fp4():
    net = Net()
    eight, four = normal(3, 2, 16).to(torch.float8_e4m3fn), torch.arange(48, dtype=torch.uint8).reshape(3, 2, 8) * 5
    one, pick = net.const(1.0), net.input(torch.tensor([2, 0], dtype=torch.int32), name="pick")
    x8, x4 = net.input(eight), net.input(four)
    scales = net.const(torch.ones(2, 2, 1))
    gathered = net.add_dequantize(net.add_gather(x4, pick, 0).get_output(0), scales, trt.float32)
    gathered.axis = 2
    got = net.run(
        net.add_dequantize(net.add_gather(x8, pick, 0).get_output(0), one, trt.float32),
        net.add_dequantize(shuffled(net, x8, first_transpose=(1, 0, 2), reshape_dims=(6, 16)).get_output(0), one, trt.float32),
        gathered,
    )
    close(got[0], eight.float().numpy()[[2, 0]])
    close(got[1], eight.float().numpy().transpose(1, 0, 2).reshape(6, 16))
    codes = np.stack([four & 15, four >> 4], -1).reshape(3, 2, 16).astype(np.uint8)
    close(got[2], codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)[[2, 0]])


def test_scatter():
    net, values = Net(), normal(3, 4)
    x = net.input(values)
    rows = net.add_scatter(
        x, net.input(torch.tensor([[2], [0]], dtype=torch.int32)), net.input(normal(2, 4, seed=1)), trt.ScatterMode.ND
    )
    indices = torch.tensor([[1, 0, 2, 2]], dtype=torch.int32)
    elements = net.add_scatter(x, net.input(indices), net.input(normal(1, 4, seed=2)), trt.ScatterMode.ELEMENT)
    got, wanted = net.run(rows, elements), [values.numpy().copy(), values.numpy().copy()]
    wanted[0][[2, 0]] = normal(2, 4, seed=1).numpy()
    np.put_along_axis(wanted[1], indices.numpy(), normal(1, 4, seed=2).numpy(), 0)
    close(got[0], wanted[0])
    close(got[1], wanted[1])
    close(values, net.inputs["x0"].numpy())  # inputs are left alone


def test_one_hot():
    net = Net()
    layer = net.add_one_hot(
        net.input(torch.tensor([[0, 2]], dtype=torch.int32)), net.const([-1.0, 5.0]), net.const(3, torch.int32), -1
    )
    close(net.run(layer), [[[5, -1, -1], [-1, -1, 5]]])
    layer.axis = 0
    close(net.run(), [[[5, -1]], [[-1, -1]], [[-1, 5]]])


def test_non_zero():
    net = Net()
    layer = net.add_non_zero(net.input(torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]])))
    same(net.run(layer), torch.tensor([[0, 1, 1], [1, 0, 2]], dtype=torch.int32))


# --- matrices ---------------------------------------------------------------------------------------------------------


def test_matrix_multiply():
    net = Net()
    a, b = normal(2, 3, 4), normal(1, 5, 4, seed=1)
    layer = net.add_matrix_multiply(net.input(a), NONE, net.input(b), TRANSPOSE)
    close(net.run(layer), a.numpy() @ b.numpy().transpose(0, 2, 1))
    net = Net()
    square = normal(1, 4, 4, seed=2)
    layer = net.add_matrix_multiply(net.input(a), NONE, net.input(square), NONE)
    close(net.run(layer), a.numpy() @ square.numpy())
    layer.op1 = TRANSPOSE
    close(net.run(), a.numpy() @ square.numpy().transpose(0, 2, 1))


def test_matrix_multiply_of_vectors():
    net = Net()
    m, v = normal(2, 3, 4), normal(2, 4, seed=1)
    x, y = net.input(m), net.input(v)
    got = net.run(
        net.add_matrix_multiply(x, NONE, y, VECTOR),
        net.add_matrix_multiply(y, VECTOR, x, TRANSPOSE),
        net.add_matrix_multiply(y, VECTOR, y, VECTOR),
    )
    product = np.einsum("brk,bk->br", m.numpy(), v.numpy())
    close(got[0], product)
    close(got[1], product)
    close(got[2], (v.numpy() ** 2).sum(1))


def test_matrix_multiply_of_bf16_accumulates_in_float32_and_rounds_once():
    net = Net()
    a, b = normal(8, 300, dtype=torch.bfloat16), normal(300, 9, seed=1, dtype=torch.bfloat16)
    got = net.run(net.add_matrix_multiply(net.input(a), NONE, net.input(b), NONE))
    exact = a.double().numpy() @ b.double().numpy()
    close(got, bf16(exact), torch.bfloat16, 1e-3)
    assert (got.float().numpy() != bf16(exact)).mean() < 0.05  # ties that float32 sums break otherwise
    net = Net()
    ones = torch.cat([torch.tensor([256.0]), torch.ones(64)]).bfloat16()
    product = net.run(net.add_matrix_multiply(net.input(ones[None]), NONE, net.const(torch.ones(65, 1).bfloat16()), NONE))
    assert product.item() == 320


def test_matmul_in_slices_is_the_same():
    a, b = normal(3, 8, 64, dtype=torch.bfloat16), normal(3, 50, 64, seed=1, dtype=torch.bfloat16).mT
    whole = oracle_formats.matmul(a, b)
    close(whole, a.float().numpy() @ b.float().numpy())
    for limit in (1, 3 * 64 * 7, 3 * 64 * 49):
        close(oracle_formats.matmul(a, b, limit=limit), whole.numpy())
    assert oracle_formats.matmul(a[:, :0], b, limit=99).shape == (3, 0, 50)
    assert oracle_formats.matmul(a[..., :0], b[:, :0]).eq(0).all()


def test_einsum():
    net = Net()
    a, b = normal(2, 3, 4), normal(2, 5, 4, seed=1)
    close(net.run(net.add_einsum([net.input(a), net.input(b)], "bik,bjk->bij")), a.numpy() @ b.numpy().transpose(0, 2, 1))


def rotated(x, angles, interleaved):
    """Pairs of elements as complex numbers, turned."""
    pairs = x[..., ::2] + 1j * x[..., 1::2] if interleaved else x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]
    turned = pairs * np.exp(1j * angles)[:, None]
    if interleaved:
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)
    return np.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("part", [0, 4])
def test_rotary_embedding(interleaved, part):
    net = Net()
    x, width = normal(2, 3, 5, 8), part or 8
    angles = normal(2, 5, width // 2, seed=1)
    layer = net.add_rotary_embedding(net.input(x), net.input(angles.cos()), net.input(angles.sin()), interleaved, part)
    wanted = np.concatenate([rotated(x.numpy()[..., :width], angles.numpy(), interleaved), x.numpy()[..., width:]], -1)
    close(net.run(layer), wanted)
    layer.interleaved = not interleaved
    assert not np.allclose(net.run().numpy(), wanted)


def test_rotary_embedding_by_position():
    net = Net()
    x, angles, positions = normal(2, 1, 3, 4, dtype=torch.bfloat16), normal(9, 2), torch.tensor([[0, 8, 3], [1, 1, 2]])
    layer = net.add_rotary_embedding(
        net.input(x), net.input(angles.cos().bfloat16()), net.input(angles.sin().bfloat16()), False, 0
    )
    layer.set_input(3, net.input(positions))
    cos, sin = (f(angles).bfloat16()[positions].double().numpy()[:, None] for f in (torch.cos, torch.sin))
    one, two = x.double().numpy()[..., :2], x.double().numpy()[..., 2:]
    close(net.run(layer), bf16(np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)), torch.bfloat16)


def attended(query, key, value, seen, added=0.0):
    """Attention one head and one row at a time, in float64."""
    q, k, v = (t.double().numpy() for t in (query, key, value))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, h, row in np.ndindex(*q.shape[:3]):
        group = h // (q.shape[1] // k.shape[1])
        scores = k[b, group] @ q[b, h, row] + np.broadcast_to(added, (*q.shape[:3], k.shape[2]))[b, h, row]
        chosen = np.broadcast_to(seen, (*q.shape[:3], k.shape[2]))[b, h, row]
        out[b, h, row] = scipy.special.softmax(scores[chosen]) @ v[b, group][chosen]
    return out


def attention(net, q, k, v, mask=None, causal="NONE"):
    dynamic = [(-1, t.shape[1], -1, t.shape[3]) for t in (q, k, v)]
    tensors = [net.input(t, shape) for t, shape in zip((q, k, v), dynamic, strict=True)]
    layer = net.add_attention_v2(*tensors, trt.AttentionNormalizationOp.SOFTMAX, getattr(trt.CausalMaskKind, causal))
    if mask is not None:
        layer.mask = net.input(mask, (-1, mask.shape[1], -1, -1), name="mask")
    layer.decomposable = True
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_a_bool_mask_and_grouped_heads(dtype):
    net = Net()
    q, k, v = normal(2, 4, 3, 8, dtype=dtype), normal(2, 2, 5, 8, seed=1, dtype=dtype), normal(2, 2, 5, 8, seed=2, dtype=dtype)
    mask = torch.rand(2, 1, 3, 5, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[..., 0] = True
    got, wanted = net.run(attention(net, q, k, v, mask)), attended(q, k, v, mask.numpy())
    close(got, bf16(wanted) if dtype == torch.bfloat16 else wanted, dtype, 5e-3 if dtype == torch.bfloat16 else 1e-5)
    net.inputs["mask"] = ~mask | True
    assert not np.allclose(net.run().float().numpy(), wanted, atol=0.05)


def test_attention_with_an_added_mask():
    net = Net()
    q, k, v, mask = normal(1, 2, 3, 4), normal(1, 1, 5, 4, seed=1), normal(1, 1, 5, 4, seed=2), normal(1, 2, 3, 5, seed=3)
    close(net.run(attention(net, q, k, v, mask)), attended(q, k, v, True, mask.numpy()), tolerance=1e-5)


@pytest.mark.parametrize("causal", ["UPPER_LEFT", "LOWER_RIGHT"])
def test_attention_causal(causal):
    net = Net()
    q, k, v = normal(1, 1, 3, 4), normal(1, 1, 5, 4, seed=1), normal(1, 1, 5, 4, seed=2)
    seen = np.arange(5) <= np.arange(3)[:, None] + (2 if causal == "LOWER_RIGHT" else 0)
    close(net.run(attention(net, q, k, v, causal=causal)), attended(q, k, v, seen), tolerance=1e-5)


def test_attention_to_nothing():
    net = Net()
    q, k, v = normal(1, 2, 3, 4), normal(1, 1, 5, 4, seed=1), normal(1, 1, 5, 4, seed=2)
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    mask[..., 1, :] = False
    got = net.run(attention(net, q, k, v, mask))
    assert got.isnan()[0, :, 1].all() and got[0, :, [0, 2]].isfinite().all()
    net.inputs |= {"x1": k[:, :, :0], "x2": v[:, :, :0], "mask": mask[..., :0]}
    assert net.run().isnan().all()
    net.inputs |= {"x0": q[:, :, :0], "mask": mask[..., :0, :0]}
    assert net.run().shape == (1, 2, 0, 4)


# --- quantization -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_with_one_scale(dtype):
    net, values = Net(), normal(4, 64, dtype=dtype) * 40
    scale = net.const(0.05)
    quantized = net.add_quantize(net.input(values), scale, trt.fp8)
    back = net.add_dequantize(quantized.get_output(0), scale, TYPES[dtype])
    got = net.run(quantized, back)
    codes = fp8(values.float().numpy() / np.float32(0.05))
    assert np.abs(codes).max() == 448  # some saturate
    close(got[0], codes, torch.float8_e4m3fn)
    wanted = codes * np.float32(0.05)
    close(got[1], bf16(wanted) if dtype == torch.bfloat16 else wanted, dtype)
    net.constants.clear()
    other = net.const(0.06)
    back.set_input(1, other)
    assert not np.allclose(net.run()[1].float().numpy(), wanted)


def test_fp8_with_a_scale_for_each_channel():
    net, values = Net(), normal(4, 4)
    scales = torch.tensor([0.5, 1.0, 0.1, 2.0])
    quantized = net.add_quantize(net.input(values), net.const(scales), trt.fp8)
    quantized.axis = 1
    back = net.add_dequantize(quantized.get_output(0), net.const(scales), trt.float32)
    back.axis = 1
    codes = fp8(values.numpy() / scales.numpy())
    got = net.run(quantized, back)
    close(got[0], codes, torch.float8_e4m3fn)
    close(got[1], codes * scales.numpy())
    quantized.axis = back.axis = 0
    close(net.run()[1], fp8(values.numpy() / scales.numpy()[:, None]) * scales.numpy()[:, None])


def test_int8():
    net, values = Net(), torch.tensor([0.25, 0.75, -300.0, 300.0, -1.25])
    scale = net.const(0.5)
    quantized = net.add_quantize(net.input(values), scale, trt.int8)
    got = net.run(quantized, net.add_dequantize(quantized.get_output(0), scale, trt.float32))
    same(got[0], torch.tensor([0, 2, -128, 127, -2], dtype=torch.int8))
    close(got[1], [0, 1, -64, 63.5, -1])


def blocked_weight(net, packed, scales, outer, axis):
    """An NVFP4 weight: block scales times an outer scale, and codes times those."""
    outer_layer = net.add_dequantize(scales, outer, trt.float32)
    outer_layer.axis = 0
    layer = net.add_dequantize(packed, outer_layer.get_output(0), trt.float32)
    layer.axis = axis
    return layer, outer_layer


def test_fp4_in_blocks_as_inputs_or_constants():
    packed = torch.randint(0, 256, (3, 2, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales, outer = (normal(3, 2, 2, seed=1).abs() + 0.1).to(torch.float8_e4m3fn), torch.tensor([0.5, 0.25, 3.0])
    net = Net()
    bound, _ = blocked_weight(net, net.input(packed), net.input(scales), net.input(outer), 2)
    kept, layer = blocked_weight(net, net.const(packed), net.const(scales), net.const(outer), 2)
    got = net.run(bound, kept)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(3, 2, 32).astype(np.uint8)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    wanted = values * np.repeat(scales.float().numpy() * outer.numpy()[:, None, None], 16, axis=2)
    close(got[0], wanted)
    close(got[1], wanted)
    layer.set_input(1, net.const([2.0, 2.0, 2.0]))
    close(net.run()[1], values * np.repeat(scales.float().numpy() * 2, 16, axis=2))


def test_fp4_blocks_along_another_axis():
    net = Net()
    packed, scales = torch.randint(0, 256, (32, 4), dtype=torch.uint8), normal(2, 8, seed=1)
    layer = net.add_dequantize(net.input(packed), net.const(scales), trt.float32)
    layer.axis = 0
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(32, 8).astype(np.uint8)
    close(net.run(layer), codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * np.repeat(scales.numpy(), 16, axis=0))


def nvfp4(x, outer):
    """Codes as numbers, and block scales, of the last axis, with ml_dtypes alone."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 16)
    scales = fp8(np.abs(blocks).max(-1) / np.float32(6) / outer)
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled = np.where(scales[..., None] == 0, 0, blocks / (scales * outer)[..., None])
    return fp4(scaled).reshape(x.shape), scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 48), (2, 3, 32), (0, 32)])
def test_dynamic_quantize(shape, dtype):
    net = Net()
    values = normal(*shape, dtype=dtype) * 3
    if shape[0]:
        values[0].view(-1)[:16] = 0
    outer = net.const(0.02)
    layer = net.add_dynamic_quantize(net.input(values, (-1, *shape[1:])), len(shape) - 1, 16, trt.fp4, trt.fp8)
    layer.set_input(1, outer)
    scales = net.add_dequantize(layer.get_output(1), outer, trt.float32)
    back = net.add_dequantize(layer.get_output(0), scales.get_output(0), trt.float32)
    back.axis = len(shape) - 1
    codes, rounded, seen = net.run(layer, layer.get_output(1), back)
    wanted, wanted_scales = nvfp4(values.float().numpy(), np.float32(0.02)) if shape[0] else (np.zeros(shape), np.zeros((0, 2)))
    close(rounded, wanted_scales, torch.float8_e4m3fn)
    close(oracle_formats.from_fp4(oracle_formats.unpack_fp4(codes)), wanted)
    close(seen, wanted * np.repeat(wanted_scales * np.float32(0.02), 16, axis=-1))
    if shape[0]:
        assert np.abs(seen.numpy() - values.float().numpy()).max() < 1.5


def test_dynamic_quantize_along_another_axis_and_by_block_shape():
    net, values = Net(), normal(32, 6)
    x, outer = net.input(values), net.const(0.02)
    layers = [
        net.add_dynamic_quantize(x, 0, 16, trt.fp4, trt.fp8),
        net.add_dynamic_quantize_v2(x, (16, 1), trt.fp4, trt.fp8),
    ]
    for layer in layers:
        layer.set_input(1, outer)
    got = net.run(*(layer.get_output(i) for layer in layers for i in (0, 1)))
    codes, scales = nvfp4(values.numpy().T, np.float32(0.02))
    for packed, rounded in (got[:2], got[2:]):
        close(oracle_formats.from_fp4(oracle_formats.unpack_fp4(packed)), codes.T)
        close(rounded, scales.T, torch.float8_e4m3fn)


def test_dynamic_quantize_saturates_scales_and_keeps_nan_to_its_block():
    net = Net()
    values = torch.full((1, 48), 1.0)
    values[0, 16], values[0, 40] = 1e6, np.nan
    layer = net.add_dynamic_quantize(net.input(values), 1, 16, trt.fp4, trt.fp8)
    layer.set_input(1, net.const(0.01))
    codes, scales = net.run(layer, layer.get_output(1))
    assert scales[0, 1] == 448 and scales[0, 2].isnan()
    assert oracle_formats.from_fp4(oracle_formats.unpack_fp4(codes))[0, 16] == 6


# --- if-conditionals, order and memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("condition_comes", ["first", "last"])
def test_conditional_runs_one_branch(condition_comes):
    net, values = Net(), normal(3)
    conditional = net.add_if_conditional()
    condition = net.input(torch.tensor(True), name="condition")
    if condition_comes == "first":
        conditional.set_condition(condition)
    x = conditional.add_input(net.input(values, name="x")).get_output(0)
    guard = conditional.add_input(net.input(torch.tensor([5], dtype=torch.int32), name="i")).get_output(0)
    unsafe = net.add_gather(x, guard, 0)  # out of range
    spread = net.add_elementwise(unsafe.get_output(0), x, trt.ElementWiseOperation.SUM)
    safe = net.add_unary(x, trt.UnaryOperation.NEG)
    first = conditional.add_output(safe.get_output(0), spread.get_output(0))
    second = conditional.add_output(x, safe.get_output(0))
    if condition_comes == "last":
        conditional.set_condition(condition)
    got = net.run(first, second)
    close(got[0], -values.numpy())
    close(got[1], values.numpy())
    net.inputs["condition"] = torch.tensor(False)
    with pytest.raises(OracleError, match=r"\(GATHER\).*beyond"):
        net.run()
    net.inputs["i"] = torch.tensor([1], dtype=torch.int32)
    got = net.run()
    close(got[0], values.numpy()[1] + values.numpy())
    close(got[1], -values.numpy())


def test_values_are_freed_after_their_last_use(monkeypatch):
    alive, most, store = set(), [0], oracle._Values.store

    def watched(self, tensor, value):
        store(self, tensor, value.clone())
        kept = self._values[tensor]
        alive.add(id(kept))
        weakref.finalize(kept, alive.discard, id(kept))
        most[0] = max(most[0], len(alive))

    monkeypatch.setattr(oracle._Values, "store", watched)
    net = Net()
    x = net.input(normal(4))
    conditional = net.add_if_conditional()
    conditional.set_condition(net.input(torch.tensor(True), name="condition"))
    for _ in range(10):
        entry = conditional.add_input(x).get_output(0)
        taken = other = entry
        for _ in range(10):
            taken = net.add_unary(taken, trt.UnaryOperation.NEG).get_output(0)
            other = net.add_elementwise(other, net.const([1.0]), trt.ElementWiseOperation.SUM).get_output(0)
        x = conditional.add_output(taken, other).get_output(0)
    assert net.network.num_layers > 300
    net.run(x)
    assert 0 < most[0] < 6


def test_every_kind_of_layer_is_one_of_the_bindings():
    assert LAYERS.keys() <= trt.LayerType.__members__.keys()
    for kind in LAYERS.values():
        assert issubclass(getattr(trt, kind.interface), trt.ILayer)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_unknown_layer_is_named():
    net = Net()
    layer = net.add_lrn(net.input(normal(1, 2, 3, 3)), 3, 1.0, 0.5, 1.0)
    layer.name = "some layer"
    with pytest.raises(OracleError, match="'some layer', is of type LRN"):
        net.run(layer)


def test_codes_are_no_numbers():
    for value in (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 32, dtype=torch.float8_e4m3fn)):
        net = Net()
        layer = net.add_reduce(net.input(value), trt.ReduceOperation.MAX, 1, True)
        with pytest.raises(OracleError, match="dequantize"):
            net.run(layer)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "'x' is missing"),
        ({"x": torch.zeros(2, 4)}, r"the network says FLOAT \(-1, 3\)"),
        ({"x": torch.zeros(2, 3, 1)}, "the network says"),
        ({"x": torch.zeros(2, 3, dtype=torch.bfloat16)}, "bfloat16"),
    ],
)
def test_inputs_that_do_not_fit(inputs, message):
    net = Net()
    layer = net.add_unary(net.input(torch.zeros(1, 3), (-1, 3), name="x"), trt.UnaryOperation.NEG)
    net.inputs = inputs
    with pytest.raises(OracleError, match=message):
        net.run(layer)


# --- whole networks that TensorRT compiles ----------------------------------------------------------------------------


def compiles(net, profiles):
    """TensorRT takes the network for an RTX GPU; profiles: by input (minimum, optimum, maximum)."""
    config, profile = BUILDER.create_builder_config(), BUILDER.create_optimization_profile()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    for name, shapes in profiles.items():
        profile.set_shape(name, *shapes)
    config.add_optimization_profile(profile)
    return BUILDER.build_serialized_network(net.network, config) is not None


def gated_mlp(x, gate, up, down):
    """The same network in numpy, rounding to bf16 after each layer."""
    g, u = bf16(x @ gate.T), bf16(x @ up.T)
    return bf16(bf16(bf16(ACTIVATIONS["GELU_TANH"](g)) * u) @ down.T)


def test_bf16_network():
    net = Net()
    x = net.input(normal(3, 32, dtype=torch.bfloat16), (-1, 32), name="x")
    weights = [normal(64, 32, seed=1), normal(64, 32, seed=2), normal(32, 64, seed=3)]
    gate, up, down = (net.const(w.bfloat16()) for w in weights)
    activated = net.add_activation(
        net.add_matrix_multiply(x, NONE, gate, TRANSPOSE).get_output(0), trt.ActivationType.GELU_TANH
    )
    raised = net.add_matrix_multiply(x, NONE, up, TRANSPOSE)
    product = net.add_elementwise(activated.get_output(0), raised.get_output(0), trt.ElementWiseOperation.PROD)
    got = net.run(net.add_matrix_multiply(product.get_output(0), NONE, down, TRANSPOSE))
    wanted = gated_mlp(net.inputs["x"].float().numpy(), *(bf16(w.numpy()) for w in weights))
    close(got, wanted, torch.bfloat16, 1e-2)
    assert (got.float().numpy() == wanted).mean() > 0.9
    assert compiles(net, {"x": ((0, 32), (4, 32), (64, 32))})


def test_nvfp4_network():
    net = Net()
    values = normal(3, 64, dtype=torch.bfloat16)
    packed = torch.randint(0, 256, (16, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = (normal(16, 4, seed=1).abs() + 0.1).to(torch.float8_e4m3fn)
    x, outer = net.input(values, (-1, 64), name="x"), net.const(0.01)
    weight, _ = blocked_weight(net, net.input(packed, name="w"), net.input(scales, name="s"), outer, 1)
    layer = net.add_dynamic_quantize(x, 1, 16, trt.fp4, trt.fp8)
    layer.set_input(1, outer)
    activation, _ = blocked_weight(net, layer.get_output(0), layer.get_output(1), outer, 1)
    a, b = (net.add_cast(t.get_output(0), trt.bfloat16).get_output(0) for t in (activation, weight))
    got = net.run(net.add_matrix_multiply(a, NONE, b, TRANSPOSE))
    codes, block = nvfp4(values.float().numpy(), np.float32(0.01))
    left = bf16(codes * np.repeat(block * np.float32(0.01), 16, axis=1))
    unpacked = np.stack([packed & 15, packed >> 4], -1).reshape(16, 64).astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
    right = bf16(unpacked.astype(np.float32) * np.repeat(scales.float().numpy() * np.float32(0.01), 16, axis=1))
    close(got, bf16(left @ right.T), torch.bfloat16, 1e-2)
    assert compiles(net, {"x": ((1, 64), (4, 64), (64, 64))})


def test_attention_network():
    net = Net()
    sizes = ((4, 3), (2, 5), (2, 5))
    q, k, v = (normal(1, *size, 64, seed=seed, dtype=torch.bfloat16) for seed, size in enumerate(sizes))
    positions = torch.tensor([[2, 3, 4]], dtype=torch.int32)
    cached = torch.tensor([[0, 1, 2, 3, -1]], dtype=torch.int32)
    rows = shuffled(net, net.input(positions, (1, -1), name="rows"), reshape_dims=(1, 1, -1, 1)).get_output(0)
    keys = shuffled(net, net.input(cached, (1, -1), name="keys"), reshape_dims=(1, 1, 1, -1)).get_output(0)
    late = net.add_elementwise(keys, rows, trt.ElementWiseOperation.GREATER).get_output(0)
    empty = net.add_elementwise(keys, net.const([[[[0]]]], torch.int32), trt.ElementWiseOperation.LESS).get_output(0)
    hidden = net.add_elementwise(late, empty, trt.ElementWiseOperation.OR).get_output(0)
    tensors = [net.input(t, (1, t.shape[1], -1, 64), name=name) for name, t in zip("qkv", (q, k, v), strict=True)]
    layer = net.add_attention_v2(*tensors, trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.NONE)
    layer.mask = net.add_unary(hidden, trt.UnaryOperation.NOT).get_output(0)
    layer.decomposable = True
    seen = (cached.numpy() >= 0) & (cached.numpy() <= positions.numpy()[0][:, None])
    got = net.run(layer)
    close(got, bf16(attended(q, k, v, seen)), torch.bfloat16, 1e-2)
    most = {"q": (1, 4, 8, 64), "k": (1, 2, 32, 64), "v": (1, 2, 32, 64), "rows": (1, 8), "keys": (1, 32)}
    least = {name: (*shape[:2], 1, 64) if len(shape) == 4 else (1, 1) for name, shape in most.items()}
    assert compiles(net, {name: (least[name], shape, shape) for name, shape in most.items()})
