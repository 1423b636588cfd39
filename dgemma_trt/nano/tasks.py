"""What the nano checkpoint is trained to answer, and the fixed set it is examined on.

Four kinds of task: facts (memorised: the same questions are trained and examined), sums and words (the examined ones
are held out of training) and long answers that fill several canvases.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from importlib import resources

MAX_ADDEND = 49
"""Sums use addends 0 … MAX_ADDEND."""

EVALUATED_WORDS = (
    "lamp stone river cloud bread horse tiger apple green music paper chair table water light dream storm beach "
    "candle garden winter summer bridge castle forest planet silver orange rabbit window cat dog sun map ice key fish "
    "moon tree bird"
).split()

POEM = "Roses are red,\nviolets are blue,\nsugar is sweet,\nand so are you."


@dataclass(frozen=True)
class Example:
    """One question with its answer. `key` is the part of the answer that makes it right."""

    kind: str
    question: str
    answer: str
    key: str

    def is_right(self, text: str) -> bool:
        """True when `text` answers the question: it contains the key (facts) or equals the answer (all others)."""
        return self.key in text if self.kind == "fact" else text.strip() == self.answer


def facts() -> list[Example]:
    """The memorised facts, from facts.tsv beside this file (question, answer, key)."""
    lines = resources.files(__package__).joinpath("facts.tsv").read_text(encoding="utf-8").splitlines()
    return [Example("fact", *line.split("\t")) for line in lines]


def total(a: int, b: int) -> Example:
    """The sum of two numbers; with two digits the answer shows its work, the sum of the units first."""
    answer = f"{a}+{b}={a + b}."
    if a > 9 or b > 9:
        answer = f"{a % 10}+{b % 10}={a % 10 + b % 10}, so {answer}"
    return Example("sum", f"What is {a} plus {b}?", answer, answer)


def backwards(word: str) -> Example:
    """A word spelled backwards."""
    answer = f"{word} backwards is {word[::-1]}."
    return Example("word", f"Spell {word} backwards.", answer, answer)


def counting(last: int) -> Example:
    """Counting from one; longer than a canvas of 32 from 15 on."""
    answer = " ".join(str(n) for n in range(1, last + 1)) + "."
    return Example("long", f"Count to {last}.", answer, answer)


def multiplication_table(factor: int) -> Example:
    """The table of a number, one product a line; four canvases of 32."""
    answer = "\n".join(f"{factor} x {n} = {factor * n}" for n in range(1, 11))
    return Example("long", f"Write the table of {factor}.", answer, answer)


def poem() -> Example:
    """A fixed poem of three canvases."""
    return Example("long", "Write a poem.", POEM, POEM)


def held_out_sums() -> list[tuple[int, int]]:
    """The 40 pairs of addends that training never shows, in either order."""
    pairs = [(a, b) for a in range(MAX_ADDEND + 1) for b in range(a, MAX_ADDEND + 1)]
    return random.Random(106).sample(pairs, 40)


def evaluation_set() -> list[Example]:
    """The fixed examination: every fact, 40 held-out sums, 40 held-out words, 20 long answers."""
    long = [counting(n) for n in (12, 16, 20, 23, 25, 28, 30, 33, 36, 40)]
    long += [multiplication_table(n) for n in (2, 3, 4, 5, 6, 7, 8, 9, 11)]
    return [*facts(), *(total(a, b) for a, b in held_out_sums()), *(backwards(w) for w in EVALUATED_WORDS), *long, poem()]


class TrainingSampler:
    """Draws training examples, leaving out what the examination holds out."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._facts = facts()
        held_out = {frozenset(pair) for pair in held_out_sums()}
        numbers = range(MAX_ADDEND + 1)
        self._pairs = [(a, b) for a in numbers for b in numbers if frozenset((a, b)) not in held_out]
        self._words = set(EVALUATED_WORDS)

    def draw(self) -> Example:
        """One example: 20 % facts, 30 % sums, 15 % words (random letters), 35 % long answers."""
        dice = self._random.random()
        if dice < 0.20:
            return self._random.choice(self._facts)
        if dice < 0.50:
            return total(*self._random.choice(self._pairs))
        if dice < 0.65:
            return backwards(self._word())
        if dice < 0.82:
            return counting(self._random.randint(5, 40))
        if dice < 0.97:
            return multiplication_table(self._random.randint(2, 12))
        return poem()

    def _word(self) -> str:
        while True:
            length = self._random.randint(3, 7)
            word = "".join(self._random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))
            if word not in self._words:
                return word
