"""The compiler stage: the network as TensorRT layers, targets, engine directories."""
