"""Quantization through NVIDIA ModelOpt, calibrated by the diffusion loop."""

from dgemma_trt.quantize.pipeline import quantize_checkpoint
from dgemma_trt.quantize.recipes import RECIPES, Recipe
from dgemma_trt.quantize.report import KindReport, QuantizationReport

__all__ = ["RECIPES", "KindReport", "QuantizationReport", "Recipe", "quantize_checkpoint"]
