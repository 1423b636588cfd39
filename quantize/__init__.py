"""Quantization through NVIDIA ModelOpt, calibrated by the diffusion loop."""
