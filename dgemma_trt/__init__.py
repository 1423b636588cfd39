"""Compiles DiffusionGemma with TensorRT and runs its diffusion loop.

from dgemma_trt import Engine
engine = Engine.open("engines/nano-nvfp4-sm120")
engine.generate(["What is the capital of France?"])[0].text
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dgemma_trt.engine import Engine as Engine
    from dgemma_trt.engine import Generation as Generation
    from dgemma_trt.errors import UserError as UserError

__all__ = ["Engine", "Generation", "UserError"]


def __getattr__(name: str) -> Any:
    # Loading torch takes a second; the command line must not pay it for `--help`.
    if name in ("Engine", "Generation"):
        from dgemma_trt import engine

        return getattr(engine, name)
    if name == "UserError":
        from dgemma_trt.errors import UserError

        return UserError
    raise AttributeError(name)
