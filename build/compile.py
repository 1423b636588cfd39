"""Compiles an emitted network for a target, on a machine that need not have a GPU, and streams the engine into a file."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dgemma_trt.build.network import Emitted
from dgemma_trt.build.targets import Target
from dgemma_trt.errors import UserError


def compile_engine(emitted: Emitted, target: Target, path: Path, progress: Callable[[str], None] | None = None) -> None:
    """Writes the engine for `target` to `path`; nothing is left there when that fails.

    progress is told each phase of TensorRT once, as it starts. TensorRT's warnings are in `emitted.log`. Ctrl-C takes effect
    at the compiler's next step.

    Raises:
        UserError: TensorRT does not compile the network (with what it says), or the file cannot be written.
        KeyboardInterrupt: cancelled.
    """
    config = emitted.builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(emitted.trt.ComputeCapability, target.name.upper()), 0)
    for profile in emitted.profiles:
        config.add_optimization_profile(profile)
    build = _Build(progress)
    monitor = _monitor(emitted.trt, build)
    config.progress_monitor = monitor
    said_before = len(emitted.log.errors)
    try:
        with path.open("wb") as file, _interrupt_to(build):
            writer = _writer(emitted.trt, build, file)
            done = emitted.builder.build_serialized_network_to_stream(emitted.network, config, writer)
        build.raise_failure()
        if not done:
            raise UserError(
                f"TensorRT does not compile this network for {target.name}: {_reasons(emitted.log.errors[said_before:])}"
            )
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        # The monitor has to outlive the configuration's use of it.
        config.progress_monitor = None


def _reasons(errors: list[str]) -> str:
    """TensorRT's errors in one line, without those that only say that this machine has no GPU."""
    telling = [error for error in errors if "catchCudaError" not in error] or errors
    return "; ".join(" ".join(error.split()) for error in telling) or "it gives no reason"


class _Build:
    """State of one build, shared with TensorRT's callbacks. They must not raise: what goes wrong is kept and stops it."""

    def __init__(self, progress: Callable[[str], None] | None) -> None:
        self._progress = progress
        self._seen: set[str] = set()
        self._failure: BaseException | None = None

    @property
    def going(self) -> bool:
        return self._failure is None

    def fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def phase(self, name: str) -> None:
        if self._progress is not None and name not in self._seen:
            self._seen.add(name)
            try:
                self._progress(name)
            except BaseException as error:
                self.fail(error)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _monitor(trt: Any, build: _Build) -> Any:
    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            build.phase(phase)

        def step_complete(self, phase: str, step: int) -> bool:
            return build.going

        def phase_finish(self, phase: str) -> None:
            pass

    return Monitor()


def _writer(trt: Any, build: _Build, file: BinaryIO) -> Any:
    class Writer(trt.IStreamWriter):
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: bytes) -> int:
            try:
                return file.write(data)
            except OSError as error:
                build.fail(error)
                return 0

    return Writer()


@contextmanager
def _interrupt_to(build: _Build) -> Iterator[None]:
    """Turns Ctrl-C and termination into a failure of the build: raised in a callback, they would end the process in C++."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ends: dict[int, BaseException] = {signal.SIGINT: KeyboardInterrupt(), signal.SIGTERM: SystemExit(128 + signal.SIGTERM)}
    before = {number: signal.signal(number, lambda number, frame: build.fail(ends[number])) for number in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
