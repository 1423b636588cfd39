"""ModelOpt and transformers, which only quantization needs: imported late, and kept quiet."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator

from dgemma_trt.errors import UserError

INSTALL = "pip install 'dgemma-trt[quantize]'"


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Imports both libraries and silences their warnings, prints and progress bars inside the block.

    Standard error stays as it is: a caller's own progress display may write there at any time.

    Raises:
        UserError: one of them is missing, or too old to know this model.
    """
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            import modelopt.torch.export
            import modelopt.torch.quantization  # noqa: F401
            from transformers import DiffusionGemmaForBlockDiffusion  # noqa: F401
            from transformers.utils import logging as transformers_logging
        except ImportError as error:
            raise UserError(f"quantizing needs nvidia-modelopt and transformers ({error}); {INSTALL}") from None
        loggers = [logging.getLogger(name) for name in ("modelopt", "transformers")]
        levels = [logger.level for logger in loggers]
        bars = transformers_logging.is_progress_bar_enabled()
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            transformers_logging.disable_progress_bar()
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            if bars:
                transformers_logging.enable_progress_bar()


def aloud(progress: Callable[[str], None]) -> Callable[[str], None]:
    """`progress` as it is outside `quiet_libraries`, to be called inside."""
    output = sys.stdout

    def speak(text: str) -> None:
        with contextlib.redirect_stdout(output):
            progress(text)

    return speak
