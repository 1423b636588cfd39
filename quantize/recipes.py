"""The quantization recipes by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dgemma_trt.errors import UserError
from dgemma_trt.weights import Precision


@dataclass(frozen=True)
class Recipe:
    """What to quantize and how.

    modelopt_config: name of ModelOpt's configuration. precision: what each quantized matmul must be in the result.
    calibrated: whether ModelOpt has to see activations.
    """

    name: str
    summary: str
    modelopt_config: str
    precision: Precision
    calibrated: bool

    def covers(self, linear: str) -> bool:
        """True for the matmuls that are quantized: all of the layers; self-conditioning, as published, is not."""
        return linear.startswith("layers.")

    def modelopt_settings(self) -> dict[str, Any]:
        """The configuration to give to ModelOpt, which leaves out router, embeddings and lm_head by itself."""
        import copy

        import modelopt.torch.quantization as mtq

        settings: dict[str, Any] = copy.deepcopy(getattr(mtq, self.modelopt_config))
        settings["quant_cfg"].append({"quantizer_name": "*self_conditioning*", "enable": False})
        return settings


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "fp8",
            "FP8 weights with a scale an output channel, activations with a dynamic scale a token",
            "FP8_PER_CHANNEL_PER_TOKEN_CFG",
            Precision.FP8,
            calibrated=False,
        ),
        Recipe(
            "nvfp4",
            "NVFP4 weights and activations (W4A4) in attention, dense MLP and experts",
            "NVFP4_DEFAULT_CFG",
            Precision.NVFP4,
            calibrated=True,
        ),
    )
}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        UserError: there is none.
    """
    if name not in RECIPES:
        raise UserError(f"{name!r} is no quantization; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]
