"""The operators of the probe by family, each on fixed inputs, forward and backward.

Inputs are made of whole numbers and powers of two, so that they are equal on every machine: random numbers are a family of
their own (`random`). Sizes are small and no powers of two, so that kernels have remainders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Operator = Callable[[], Sequence[Tensor]]
Members = dict[str, Operator]

_WIDE = 1 << 24  # what a float32 holds exactly
_DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
    """Fixed numbers between -0.5 and 0.5, equal on every machine."""
    count = math.prod(shape)
    whole = (torch.arange(1, count + 1) * 2654435761 + salt * 40503) % _WIDE
    return (whole.to(torch.float64) / _WIDE - 0.5).to(dtype).view(shape)


def through(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result of a function, and the gradients of its floating-point inputs."""
    inputs = tuple(x.clone().requires_grad_(x.is_floating_point()) for x in inputs)
    result = function(*inputs)
    wanted = [x for x in inputs if x.requires_grad]
    return [result, *torch.autograd.grad(result, wanted, numbers(*result.shape, dtype=result.dtype, salt=7))]


def through_module(module: nn.Module, *inputs: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same for a module, whose parameters count as inputs."""
    module = module.to(dtype)
    with torch.no_grad():
        for salt, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, dtype=dtype, salt=salt))
    inputs = tuple(x.clone().requires_grad_(x.is_floating_point()) for x in inputs)
    result = module(*inputs)
    result = result[0] if isinstance(result, tuple) else result
    wanted = [x for x in (*inputs, *module.parameters()) if x.requires_grad]
    gradients = torch.autograd.grad(result, wanted, numbers(*result.shape, dtype=result.dtype, salt=7))
    return [result, *gradients, *module.buffers()]


def matmul() -> Members:
    found: Members = {}
    for kind, dtype in _DTYPES.items():
        for m, k, n in ((3, 5, 7), (33, 65, 17), (128, 256, 96), (200, 999, 100)):
            x, y = numbers(m, k, dtype=dtype), numbers(k, n, dtype=dtype, salt=1)
            found[f"mm {kind} {m}x{k}x{n}"] = partial(through, torch.mm, x, y)
        found[f"linear {kind}"] = partial(
            through,
            F.linear,
            numbers(20, 129, dtype=dtype),
            numbers(70, 129, dtype=dtype),
            numbers(70, dtype=dtype),
        )
        found[f"bmm {kind}"] = partial(
            through, torch.bmm, numbers(6, 31, 40, dtype=dtype), numbers(6, 40, 23, dtype=dtype)
        )
    return found


def gemv() -> Members:
    found: Members = {}
    for kind, dtype in _DTYPES.items():
        for m, k in ((7, 33), (129, 300), (1, 1000), (500, 20)):
            x, y = numbers(m, k, dtype=dtype), numbers(k, dtype=dtype, salt=1)
            found[f"mv {kind} {m}x{k}"] = partial(through, torch.mv, x, y)
        found[f"dot {kind}"] = partial(
            through, torch.dot, numbers(1003, dtype=dtype), numbers(1003, dtype=dtype, salt=1)
        )
    return found


def convolution() -> Members:
    found: Members = {}
    cases = {
        "3x3": (nn.Conv2d(5, 13, 3), (2, 5, 15, 15)),
        "3x3 stride 2": (nn.Conv2d(16, 32, 3, stride=2, padding=1), (3, 16, 17, 17)),
        "1x1": (nn.Conv2d(32, 24, 1), (2, 32, 9, 9)),
        "7x7": (nn.Conv2d(3, 16, 7, stride=2, padding=3), (2, 3, 33, 33)),
        "depthwise": (nn.Conv2d(12, 12, 3, groups=12), (2, 12, 11, 11)),
        "grouped": (nn.Conv2d(12, 24, 3, groups=3), (2, 12, 11, 11)),
        "dilated": (nn.Conv2d(8, 8, 3, dilation=2), (2, 8, 14, 14)),
        "1d": (nn.Conv1d(7, 11, 5), (3, 7, 40)),
        "3d": (nn.Conv3d(3, 5, 3), (2, 3, 8, 8, 8)),
        "transposed": (nn.ConvTranspose2d(6, 4, 3, stride=2), (2, 6, 9, 9)),
    }
    for name, (module, shape) in cases.items():
        found[name] = partial(through_module, module, numbers(*shape))
    layout = torch.channels_last
    found["channels last"] = partial(
        through_module, nn.Conv2d(16, 32, 3), numbers(2, 16, 14, 14).contiguous(memory_format=layout)
    )
    found["bf16"] = partial(
        through_module,
        nn.Conv2d(16, 32, 3),
        numbers(2, 16, 14, 14, dtype=torch.bfloat16),
        dtype=torch.bfloat16,
    )
    return found


def normalization() -> Members:
    return {
        "batch-norm 1d": partial(through_module, nn.BatchNorm1d(37), numbers(19, 37)),
        "batch-norm 2d": partial(through_module, nn.BatchNorm2d(6), numbers(4, 6, 9, 9)),
        "batch-norm channels last": partial(
            through_module,
            nn.BatchNorm2d(16),
            numbers(4, 16, 9, 9).contiguous(memory_format=torch.channels_last),
        ),
        "layer-norm 33": partial(through_module, nn.LayerNorm(33), numbers(10, 33)),
        "layer-norm 512": partial(through_module, nn.LayerNorm(512), numbers(40, 512)),
        "group-norm": partial(through_module, nn.GroupNorm(3, 12), numbers(4, 12, 7, 7)),
        "instance-norm": partial(through_module, nn.InstanceNorm2d(5, affine=True), numbers(3, 5, 9, 9)),
        "RMS-norm": partial(through_module, nn.RMSNorm(65), numbers(12, 65)),
        "local response": partial(through, partial(F.local_response_norm, size=3), numbers(2, 7, 5, 5)),
        "normalize": partial(through, F.normalize, numbers(11, 77)),
    }


def softmax() -> Members:
    found: Members = {}
    classes = torch.arange(31) * 7 % 77
    for kind, dtype in _DTYPES.items():
        x = numbers(31, 77, dtype=dtype) * 8
        found[f"softmax {kind}"] = partial(through, partial(torch.softmax, dim=1), x)
        found[f"softmax, first dimension {kind}"] = partial(through, partial(torch.softmax, dim=0), x)
        found[f"log-softmax {kind}"] = partial(through, partial(torch.log_softmax, dim=1), x)
        found[f"logsumexp {kind}"] = partial(through, partial(torch.logsumexp, dim=1), x)
        found[f"cross-entropy {kind}"] = partial(through, F.cross_entropy, x, classes)
    return found


def attention() -> Members:
    found: Members = {}
    for kind, dtype in _DTYPES.items():
        for length in (9, 64):
            q, k, v = (numbers(2, 3, length, 16, dtype=dtype, salt=salt) * 4 for salt in range(3))
            for name, causal in (("", False), ("causal ", True)):
                function = partial(F.scaled_dot_product_attention, is_causal=causal)
                found[f"{name}{kind} {length}"] = partial(through, function, q, k, v)
    mask = numbers(2, 3, 20, 20) * 2
    q, k, v = (numbers(2, 3, 20, 16, salt=salt) for salt in range(3))
    found["with mask"] = partial(
        through, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), q, k, v
    )
    x = numbers(2, 15, 24)
    heads = nn.MultiheadAttention(24, 4, batch_first=True)
    found["several heads"] = partial(through_module, heads, x, x, x)
    return found


def embedding() -> Members:
    indices = torch.arange(60).view(5, 12) * 31 % 40
    table = numbers(40, 33)
    return {
        "embedding": partial(through, lambda table: F.embedding(indices, table), table),
        "bag of sums": partial(through, lambda table: F.embedding_bag(indices, table, mode="sum"), table),
        "bag of means": partial(through, lambda table: F.embedding_bag(indices, table, mode="mean"), table),
        "index": partial(through, lambda table: table[indices], table),
        "index_add": partial(
            through, lambda table, x: table.index_add(0, indices.flatten(), x), table, numbers(60, 33)
        ),
        "scatter_add": partial(
            through,
            lambda table, x: table.scatter_add(0, indices[:, :1].expand(5, 33), x),
            table,
            numbers(5, 33),
        ),
        "gather": partial(through, lambda table: table.gather(1, indices[:, :12] % 33), table),
    }


def reduction() -> Members:
    found: Members = {}
    shapes = {
        "all": (None, (77, 131)),
        "rows": (1, (77, 131)),
        "columns": (0, (77, 131)),
        "long": (None, (70_001,)),
    }
    for kind, dtype in _DTYPES.items():
        for where, (dim, shape) in shapes.items():
            x = numbers(*shape, dtype=dtype)
            found[f"sum {kind} {where}"] = partial(through, partial(torch.sum, dim=dim), x)
            found[f"mean {kind} {where}"] = partial(through, partial(torch.mean, dim=dim), x)
    x = numbers(77, 131)
    for name in ("var", "std", "norm", "prod"):
        found[name] = partial(through, getattr(torch, name), x if name != "prod" else x[:3] + 1)
    found["cumsum"] = partial(through, partial(torch.cumsum, dim=1), x)
    found["cumprod"] = partial(through, partial(torch.cumprod, dim=1), x + 1)
    found["max"] = partial(through, partial(torch.amax, dim=1), x)
    found["average pooling"] = partial(through, partial(F.avg_pool2d, kernel_size=3), numbers(2, 5, 13, 13))
    found["max pooling"] = partial(through, partial(F.max_pool2d, kernel_size=3), numbers(2, 5, 13, 13))
    found["adaptive pooling"] = partial(through, lambda x: F.adaptive_avg_pool2d(x, 4), numbers(2, 5, 13, 13))
    found["interpolation"] = partial(
        through,
        lambda x: F.interpolate(x, size=(11, 19), mode="bilinear", align_corners=False),
        numbers(2, 3, 7, 7),
    )
    found["mse loss"] = partial(through, F.mse_loss, x, x.flip(0))
    found["clip_grad_norm_"] = partial(_clipped, x)
    return found


def pointwise() -> Members:
    found: Members = {}
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        **{name: getattr(torch, name) for name in ("exp", "sigmoid", "tanh", "erf", "sin", "cos", "expm1")},
        **{
            name: getattr(F, name)
            for name in ("relu", "gelu", "silu", "elu", "softplus", "mish", "leaky_relu")
        },
        "gelu tanh": partial(F.gelu, approximate="tanh"),
        "log": lambda x: torch.log(x.abs() + 0.125),
        "sqrt": lambda x: torch.sqrt(x.abs() + 0.125),
        "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.125),
        "pow": lambda x: torch.pow(x.abs() + 0.125, 1.7),
        "multiply and add": lambda x: x * 1.1 + x.flip(0) * 0.3,
        "divide": lambda x: x / (x.flip(0).abs() + 0.7),
        "lerp": lambda x: torch.lerp(x, x.flip(0), 0.3),
        "addcmul": lambda x: torch.addcmul(x, x, x.flip(0), value=0.7),
        "addcdiv": lambda x: torch.addcdiv(x, x, x.flip(0).abs() + 1.0, value=0.7),
    }
    for kind, dtype in _DTYPES.items():
        for name, function in functions.items():
            found[f"{name} {kind}"] = partial(through, function, numbers(1003, dtype=dtype) * 6)
    return found


def random() -> Members:
    return {
        "rand": lambda: [torch.rand(1003)],
        "rand f64": lambda: [torch.rand(1003, dtype=torch.float64)],
        "randn": lambda: [torch.randn(1003)],
        "randn, few": lambda: [torch.randn(7)],
        "randn f64": lambda: [torch.randn(1003, dtype=torch.float64)],
        "randn bf16": lambda: [torch.randn(1003, dtype=torch.bfloat16)],
        "randint": lambda: [torch.randint(0, 1000, (1003,))],
        "randperm": lambda: [torch.randperm(1003)],
        "bernoulli": lambda: [torch.bernoulli(torch.full((1003,), 0.3))],
        "exponential": lambda: [torch.empty(1003).exponential_()],
        "multinomial": lambda: [torch.multinomial(numbers(100) + 0.5, 20)],
        "dropout": partial(through, partial(F.dropout, p=0.2), numbers(1003)),
        "feature dropout": partial(through, partial(F.dropout2d, p=0.2), numbers(5, 6, 7, 7)),
        "kaiming_uniform_": lambda: [nn.init.kaiming_uniform_(torch.empty(33, 65))],
        "xavier_normal_": lambda: [nn.init.xavier_normal_(torch.empty(33, 65))],
        "trunc_normal_": lambda: [nn.init.trunc_normal_(torch.empty(33, 65))],
        "orthogonal_": lambda: [nn.init.orthogonal_(torch.empty(33, 65))],
    }


def recurrent() -> Members:
    return {
        "LSTM": partial(through_module, nn.LSTM(13, 21, 2, batch_first=True), numbers(4, 9, 13)),
        "GRU": partial(through_module, nn.GRU(13, 21, batch_first=True), numbers(4, 9, 13)),
    }


def optimizer() -> Members:
    kinds: dict[str, Callable[[list[Tensor]], Any]] = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        "Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
        "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
        "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    }
    return {name: partial(_updated, make) for name, make in kinds.items()}


def numpy() -> Members:
    """NumPy chooses its instructions when it is imported: no level of determinism pins them."""
    x = numbers(1003).numpy()
    functions: dict[str, Callable[[], Any]] = {
        "sum": lambda: x.sum(),
        "exp": lambda: np.exp(x),
        "sin": lambda: np.sin(x),
        "matmul": lambda: x[:1000].reshape(20, 50) @ x[:1000].reshape(50, 20),
        "normal": lambda: np.random.RandomState(1).normal(size=1003),
    }
    return {name: partial(_from_numpy, function) for name, function in functions.items()}


FAMILIES: dict[str, Callable[[], Members]] = {
    family.__name__: family
    for family in (
        matmul,
        gemv,
        convolution,
        normalization,
        softmax,
        attention,
        embedding,
        reduction,
        pointwise,
        random,
        recurrent,
        optimizer,
        numpy,
    )
}


def _clipped(gradient: Tensor) -> list[Tensor]:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    return [torch.nn.utils.clip_grad_norm_([parameter], 1.0), parameter.grad]


def _updated(make: Callable[[list[Tensor]], Any]) -> list[Tensor]:
    """Parameters after three updates."""
    parameters = [nn.Parameter(numbers(*shape)) for shape in ((33, 65), (65,), (5,))]
    made = make(list(parameters))
    for step in range(3):
        for parameter in parameters:
            parameter.grad = numbers(*parameter.shape, salt=step + 1)
        made.step()
    return list(parameters)


def _from_numpy(function: Callable[[], Any]) -> list[Tensor]:
    return [torch.from_numpy(np.atleast_1d(np.asarray(function())))]
