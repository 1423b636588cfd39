"""Plugin kernels for TensorRT."""
