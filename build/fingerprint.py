"""A digest of a network definition: the same layers, tensors and constants give the same digest."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from dgemma_trt.build.network import Emitted


def fingerprint(emitted: Emitted) -> str:
    """sha256, hexadecimal, over every layer's type, name and tensors, and over the bytes of the constants."""
    digest = hashlib.sha256()
    network = emitted.network
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        tensors = [layer.get_input(i) for i in range(layer.num_inputs)]
        tensors += [layer.get_output(i) for i in range(layer.num_outputs)]
        digest.update(repr((str(layer.type), layer.name, [_describe(tensor) for tensor in tensors])).encode())
    for name, constant in sorted(emitted.constants.items()):
        digest.update(repr((name, str(constant.dtype), tuple(constant.shape))).encode())
        digest.update(constant.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _describe(tensor: Any) -> tuple[str, str, tuple[int, ...]] | None:
    return None if tensor is None else (tensor.name, str(tensor.dtype), tuple(tensor.shape))
