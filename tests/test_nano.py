"""The bundled nano checkpoint: what it is, what it answers, and whole runs against the reference with the same draws."""

from __future__ import annotations

import pytest
import torch
from our_draws import patch_draws
from transformers import DiffusionGemmaForBlockDiffusion

from dgemma_trt.checkpoint import Checkpoint
from dgemma_trt.engine import Engine
from dgemma_trt.nano.evaluate import examine
from dgemma_trt.nano.tasks import TrainingSampler, evaluation_set, held_out_sums
from dgemma_trt.runtime.events import Committed, End
from dgemma_trt.sources import find_checkpoint

FOLDER = find_checkpoint("nano")
T = 32


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.open(FOLDER, "cpu", torch.bfloat16)


def test_it_has_every_feature_of_the_architecture() -> None:
    checkpoint = Checkpoint(FOLDER)
    config = checkpoint.config
    assert {layer.sliding for layer in config.layers} == {True, False}
    for layer in config.layers:
        scalars = [checkpoint.tensor(f"{layer.name}.layer_scalar.{side}").item() for side in ("encoder", "decoder")]
        assert len({*scalars, 1.0}) == 3
        widths = [config.hidden_size, config.dense_width, config.expert_width, layer.heads * layer.head_dim]
        assert len(set(widths)) == 4 and 2 * config.expert_width != config.hidden_size
    assert checkpoint.generation_config.end_token_ids == (1, 106, 50)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 8e6


def test_held_out_questions_are_never_trained() -> None:
    held_out = {f"What is {a} plus {b}?" for x, y in held_out_sums() for a, b in ((x, y), (y, x))}
    held_out |= {example.question for example in evaluation_set() if example.kind == "word"}
    sampler = TrainingSampler(0)
    assert held_out.isdisjoint(sampler.draw().question for _ in range(20_000))


def test_it_answers_the_evaluation_set_and_stops_early(engine: Engine) -> None:
    examples = evaluation_set()[::6]
    scores = examine(engine, examples)
    assert scores.keys() == {"fact", "sum", "word", "long", "all"}
    assert sum(scores["all"].right) >= 0.95 * len(examples), scores["all"].wrong
    assert sum(scores["all"].steps) / len(scores["all"].steps) < 24


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_it_answers_each_kind_of_the_whole_evaluation_set(seed: int, engine: Engine) -> None:
    scores = examine(engine, evaluation_set(), seed)
    for kind, score in scores.items():
        assert sum(score.right) >= 0.95 * len(score.right), (kind, score.wrong)


def test_an_answer_longer_than_a_canvas(engine: Engine) -> None:
    (answer,) = engine.generate(["Write a poem."], seed=3)
    assert answer.text.splitlines() == ["Roses are red,", "violets are blue,", "sugar is sweet,", "and so are you."]
    assert len(answer.canvases) == 3 and answer.finish_reason == "stop"


def test_answers_do_not_depend_on_neighbours(engine: Engine) -> None:
    questions = ["What is the capital of Norway?", "Count to 20.", "Spell bird backwards."]
    together = engine.generate(questions, seed=11)
    for question, answer in zip(questions, together, strict=True):
        assert engine.generate([question], seed=11)[0].token_ids == answer.token_ids


def test_open_streams_do_not_disturb_each_other(engine: Engine) -> None:
    question = "What is the capital of Norway?"
    (alone,) = engine.generate(question, seed=4)
    abandoned = engine.stream("Write a poem.")
    next(abandoned)
    both = zip(engine.stream(question, seed=4), engine.stream("Count to 20."), strict=False)
    tokens = [token for event, _ in both if isinstance(event, Committed) for token in event.token_ids]
    del both
    assert tokens == alone.token_ids == engine.generate(question, seed=4)[0].token_ids
    engine.logits([[2, 5]], torch.tensor([[7, 8]]))
    assert [event for event in abandoned if isinstance(event, End)] == [End("stop")]
    assert engine.scheduler.running == engine.scheduler.waiting == 0


def test_more_open_streams_than_slots_wait_their_turn(engine: Engine) -> None:
    streams = [engine.stream("Write a poem.") for _ in range(engine.session.limits.max_batch + 3)]
    for stream in streams[: engine.session.limits.max_batch]:
        next(stream)
    assert "Oslo" in engine.generate("What is the capital of Norway?")[0].text
    for stream in streams:
        assert [event for event in stream if isinstance(event, End)] == [End("stop")]
    assert engine.scheduler.running == engine.scheduler.waiting == 0


def test_a_stop_string_ends_the_answer_before_it(engine: Engine) -> None:
    (whole,) = engine.generate("Write a poem.", seed=3)
    (cut,) = engine.generate("Write a poem.", seed=3, stop="sugar")
    assert cut.text == whole.text.split("sugar")[0] and cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


@pytest.mark.parametrize("question", ["What is the capital of Peru?", "Spell cat backwards.", "Count to 20.", "Write a poem."])
def test_whole_runs_equal_those_of_the_reference(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, with the same draws. These runs were seen to be equal; rounding could in principle part them at a draw."""
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(FOLDER, dtype=torch.float32).eval()
    ours = Engine.open(FOLDER, "cpu")
    prompt = ours.text.chat([{"role": "user", "content": question}])
    (answer,) = ours.generate([prompt], seed=5, max_new_tokens=4 * T)
    patch_draws(monkeypatch, 5, T)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=4 * T)
    assert answer.token_ids == theirs.sequences[0, len(prompt) :][: len(answer.token_ids)].tolist()
    assert theirs.sequences[0, len(prompt) + len(answer.token_ids)].item() == 106
    assert answer.statistics.tokens_per_forward == pytest.approx(float(theirs.tokens_per_forward[0]))
