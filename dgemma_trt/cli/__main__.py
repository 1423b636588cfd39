"""`python -m dgemma_trt.cli`."""

from dgemma_trt.cli import main

main(prog_name="dgemma-trt")
