"""How one request is generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dgemma_trt.config import GenerationConfig
from dgemma_trt.errors import UserError
from dgemma_trt.runtime import randomness


@dataclass(frozen=True)
class GenerationParameters:
    """Parameters of one request, each within its range.

    max_new_tokens: exact limit; None: up to the context limit. temperature: 1 is the checkpoint's schedule, 0 takes the argmax
    in place of the draw, anything else multiplies t_min and t_max. entropy_bound and confidence_threshold are in nats. stop:
    strings that end the answer, which then ends before them. drafts: whether drafts are told; they never change what is
    committed.
    """

    end_token_ids: tuple[int, ...]
    max_denoising_steps: int
    entropy_bound: float
    t_min: float
    t_max: float
    stability_threshold: int
    confidence_threshold: float
    max_new_tokens: int | None = None
    temperature: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    drafts: bool = True

    @classmethod
    def of(cls, config: GenerationConfig, **wanted: Any) -> GenerationParameters:
        """The checkpoint's parameters with those in `wanted` replaced; None keeps the checkpoint's.

        What other decoders do and this one cannot, such as top_p, is accepted where its value would change nothing.

        Raises:
            UserError: an unknown parameter, or a value outside its range.
        """
        given = {name: value for name, value in wanted.items() if value is not None}
        for name in sorted(given.keys() - cls.__dataclass_fields__.keys()):
            if name not in _NEUTRAL:
                raise UserError(f"{name} is no generation parameter; known: {', '.join(cls.__dataclass_fields__)}")
            if given.pop(name) not in _NEUTRAL[name]:
                raise UserError(f"{name} is {wanted[name]!r}; denoising a canvas cannot do that: leave it out")
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        for name in ("stop", "end_token_ids"):
            if isinstance(given.get(name), list):
                given[name] = tuple(given[name])
        parameters = cls(**{**vars(config), **given})
        parameters._check()
        return parameters

    def _check(self) -> None:
        randomness.check_seed(self.seed)
        for name, lowest, highest in _WHOLE:
            value = getattr(self, name)
            if value is not None and not (_is_whole(value) and lowest <= value <= highest):
                raise UserError(f"{name} is {value!r}; it must be a whole number from {lowest} to {highest}")
        for name, least, most in _REAL:
            value = getattr(self, name)
            real = isinstance(value, int | float) and not isinstance(value, bool)
            if not (real and (least <= value <= most or (name == "temperature" and value == 0))):
                raise UserError(f"{name} is {value!r}; it must be {'0, or ' * (name == 'temperature')}from {least} to {most}")
        if not isinstance(self.end_token_ids, tuple) or not all(map(_is_whole, self.end_token_ids)):
            raise UserError(f"end_token_ids is {self.end_token_ids!r}; it must be a list of token ids")
        if not isinstance(self.stop, tuple) or not all(isinstance(string, str) and string for string in self.stop):
            raise UserError(f"stop is {self.stop!r}; it must be a string or a list of strings, none of them empty")
        if not isinstance(self.drafts, bool):
            raise UserError(f"drafts is {self.drafts!r}; it must be true or false")
        if self.t_min > self.t_max:
            raise UserError(f"t_min is {self.t_min}, above t_max {self.t_max}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_WHOLE = (("max_new_tokens", 1, 2**31 - 1), ("max_denoising_steps", 1, 1_000_000), ("stability_threshold", 0, 1_000_000))
_REAL = (
    ("entropy_bound", 1e-9, 1e9),
    ("confidence_threshold", 1e-9, 1e9),
    # Logits are at most 30 or so: beyond these their quotients mean nothing, or overflow.
    ("t_min", 1e-3, 1e3),
    ("t_max", 1e-3, 1e3),
    ("temperature", 1e-2, 1e2),
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "grammar": ("",),
}
"""Parameters of left-to-right decoders, and the values with which they do nothing."""
