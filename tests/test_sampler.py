"""The loop's decisions against transformers' own classes on the same logits, and draws from a vocabulary as a distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.distributions import Categorical
from transformers import EosTokenCriteria, StoppingCriteriaList
from transformers.models.diffusion_gemma import generation_diffusion_gemma as reference

from dgemma_trt.runtime import sampler
from dgemma_trt.runtime.randomness import Purpose, uniforms
from dgemma_trt.runtime.vocabulary import BLOCK, _first_beyond, read_vocabulary

T, V = 16, 199
LARGEST = 1 - 2**-24
"""The largest draw there is."""


def random_logits(seed: int, rows: int = T, vocab: int = V) -> Tensor:
    """Float32 [rows, vocab] from flat to peaked: rows whose entropies are far apart."""
    drawn = np.random.default_rng(seed).normal(size=(rows, vocab)) * np.linspace(0.5, 12, rows)[:, None]
    return torch.from_numpy(drawn).float()


def draws(count: int, seed: int = 0) -> Tensor:
    return uniforms(seed, 0, 1, Purpose.SAMPLE, count)


# --- temperature, acceptance, stopping, the end ------------------------------------------------------------------------------


@pytest.mark.parametrize(("t_min", "t_max", "steps"), [(0.4, 0.8, 48), (0.1, 2.0, 7), (0.0, 1.0, 1)])
def test_temperatures_are_those_of_the_reference(t_min: float, t_max: float, steps: int) -> None:
    processor = reference.LinearTemperatureScheduleLogitsProcessor(t_min, t_max, steps)
    logits = random_logits(0)
    for remaining in range(steps, 0, -1):
        expected = processor(None, logits, cur_step=torch.tensor(remaining, dtype=torch.int32))
        assert torch.equal(logits / sampler.schedule_temperature(remaining, steps, t_min, t_max), expected)


@pytest.mark.parametrize("bound", [1e-6, 0.1, 1.0, 10.0, 1000.0])
def test_acceptance_and_renoising_are_those_of_the_reference(bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.stack([random_logits(seed)[torch.randperm(T)] for seed in range(8)])
    theirs = reference.EntropyBoundSampler(reference.EntropyBoundSamplerConfig(bound), T, V, 48)
    current, sampled, noise = (torch.full((8, T), token) for token in (1, 2, 3))
    accepted = theirs.accept_canvas(current, sampled, logits, 1)
    monkeypatch.setattr(torch, "randint", lambda **_: noise)
    renoised = theirs.renoise_canvas(accepted, 1)
    for row, entropy in enumerate(Categorical(logits=logits).entropy()):
        mask = sampler.accept(entropy, bound)
        assert torch.equal(mask, theirs.accepted_token_mask[row])
        assert torch.equal(torch.where(mask, sampled[row], noise[row]), renoised[row])


def test_a_position_counts_only_the_entropy_accepted_before_it() -> None:
    assert sampler.accept(torch.tensor([0.06, 0.03, 5.0, 0.02]), 0.1).tolist() == [True, True, False, True]
    assert sampler.accept(torch.tensor([0.0625, 0.0625, 7.0, 9.0]), 0.125).tolist() == [True, True, True, False]
    assert sampler.accept(torch.tensor([3.0, 2.0, 1.0]), 0.1).tolist() == [False, False, True]


def test_equal_entropies_are_accepted_in_order_of_position() -> None:
    assert sampler.accept(torch.full((6,), 0.0625), 0.125).tolist() == [True, True, True, False, False, False]
    assert sampler.accept(torch.tensor([1.0] * 300), 99.5).nonzero().flatten().tolist() == list(range(100))
    assert sampler.accept(torch.tensor([0.5, 0.2, 0.5, 0.2]), 0.3).tolist() == [False, True, False, True]
    assert sampler.accept(torch.tensor([0.5, 0.2, 0.5, 0.2]), 0.5).tolist() == [True, True, False, True]


@pytest.mark.parametrize("threshold", [0, 1, 2, 3])
def test_stopping_is_that_of_the_reference(threshold: int) -> None:
    """Four canvases at once that settle, waver and grow certain at different steps."""
    rng = np.random.default_rng(threshold)
    theirs = reference.StableAndConfidentStoppingCriteria(threshold, confidence_threshold=0.005)
    ours = [sampler.Stopping(threshold, 0.005) for _ in range(4)]
    best = torch.from_numpy(rng.integers(0, V, (4, T)))
    stops = 0
    for _ in range(60):
        changed = torch.from_numpy(rng.random(4) < 0.3)
        best[changed, int(rng.integers(T))] = int(rng.integers(V))
        height = torch.from_numpy(rng.choice([4.0, 12.0, 14.0, 40.0], (4, 1, 1)))
        logits = torch.nn.functional.one_hot(best, V) * height.float()
        expected = theirs(best, logits)
        found = [each.update(best[row].clone(), Categorical(logits=logits[row]).entropy()) for row, each in enumerate(ours)]
        assert found == expected.tolist()
        stops += sum(found)
    assert 0 < stops < 240


@pytest.mark.parametrize(("threshold", "step"), [(0, 1), (1, 2), (2, 3)])
def test_constant_certain_canvases_stop_after_the_threshold_and_one_step(threshold: int, step: int) -> None:
    stopping = sampler.Stopping(threshold, 0.005)
    found = [stopping.update(torch.arange(T), torch.zeros(T)) for _ in range(4)]
    assert found.index(True) + 1 == step


def test_confidence_is_strictly_below_the_threshold() -> None:
    assert not sampler.Stopping(0, 0.25).update(torch.arange(T), torch.full((T,), 0.25))
    assert sampler.Stopping(0, 0.25).update(torch.arange(T), torch.full((T,), 0.2499))


@pytest.mark.parametrize("end_tokens", [[1], [1, 106, 50]])
def test_canvases_are_cut_where_the_reference_starts_to_pad(end_tokens: list[int]) -> None:
    pad, prompt = 0, [1, 7, 9]
    cases = [
        [5, 6, 7, 8, 9, 11],
        [5, 6, 1, 8, 9, 11],
        [5, 106, 7, 1, 50, 106],
        [1, 2, 3, 4, 5, 6],
        [5, 6, 7, 8, 9, 50],
        [1] * 6,
        [106, 1, 106, 1, 106, 1],
        [pad] * 6,
        [5, pad, pad, 1, pad, 6],
    ]
    config = reference.DiffusionGemmaGenerationConfig(pad_token_id=pad, eos_token_id=end_tokens)
    criteria = StoppingCriteriaList([EosTokenCriteria(end_tokens)])
    ids, unfinished = torch.tensor([prompt + case for case in cases]), torch.zeros(len(cases), dtype=torch.bool)
    finalized, finished = reference.DiffusionGemmaGenerationMixin._finalize_canvas(
        ids, unfinished, config, criteria, canvas_length=6, eos_tensor=torch.tensor(end_tokens)
    )
    for case, canvas, ended in zip(cases, finalized[:, len(prompt) :].tolist(), finished.tolist(), strict=True):
        kept, found = sampler.before_end(case, end_tokens)
        end_token = case[len(kept) : len(kept) + 1] if found else []
        assert found == ended
        assert kept + end_token + [pad] * (6 - len(kept) - len(end_token)) == canvas


def test_without_end_tokens_a_canvas_is_kept_whole() -> None:
    assert sampler.before_end([5, 1, 106], ()) == ([5, 1, 106], False)


# --- reading the vocabulary --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [V, BLOCK, 3 * BLOCK, 3 * BLOCK + 1, 7])
def test_argmax_entropy_and_logprob_are_those_of_the_softmax(vocab: int) -> None:
    z = random_logits(1, vocab=vocab)
    read, exact = read_vocabulary(z, draws(T)), z.double()
    assert torch.equal(read.best_ids, z.argmax(-1))
    assert (read.entropy - Categorical(logits=exact).entropy()).abs().max() < 2e-6
    assert (read.entropy - Categorical(logits=z).entropy()).abs().max() < 1e-5
    assert (read.best_logprob - exact.log_softmax(-1).amax(-1)).abs().max() < 2e-6
    assert (read.probabilities / read.total[:, None] - exact.softmax(-1)).abs().max() < 1e-6
    assert read.sampled_ids.max() < vocab
    for found in (read.entropy, read.best_logprob, read.probabilities, read.total):
        assert found.dtype == torch.float32


def test_the_first_of_equal_maxima_is_the_best() -> None:
    z = torch.zeros(2, 2000)
    z[1, [700, 1500]] = 3.0
    assert read_vocabulary(z, draws(2)).best_ids.tolist() == [0, 700]


def test_flat_rows_of_the_full_vocabulary_are_drawn_exactly() -> None:
    """On 2**18 equal probabilities every sum is exact, so the token is the integer part of u * 2**18."""
    uniform = draws(64)
    uniform[:4] = torch.tensor([0.0, LARGEST, 2**-18, 2**-18 - 2**-24])
    read = read_vocabulary(torch.full((64, 2**18), -3.0), uniform)
    assert torch.equal(read.sampled_ids, (uniform.double() * 2**18).long())
    assert read.entropy.numpy() == pytest.approx(18 * np.log(2), abs=1e-5)


def test_draws_from_a_large_vocabulary_follow_the_cumulative_distribution() -> None:
    """Against float64: another token only where the draw lies within rounding of a boundary between tokens."""
    z = random_logits(2, rows=8, vocab=2**18) / 6
    for seed in range(3):
        uniform = draws(8, seed)
        sampled = read_vocabulary(z, uniform).sampled_ids
        cumulative = z.double().softmax(-1).cumsum(-1)
        upper = cumulative.gather(-1, sampled[:, None])[:, 0]
        lower = upper - z.double().softmax(-1).gather(-1, sampled[:, None])[:, 0]
        assert (uniform >= lower - 1e-7).all() and (uniform <= upper + 1e-7).all()


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 8.0], ids=["flat", "nearly flat", "peaked", "sharp"])
@pytest.mark.parametrize("vocab", [V, 1300])
def test_draws_are_distributed_as_the_softmax(scale: float, vocab: int) -> None:
    count = 8_000
    z = torch.from_numpy(np.random.default_rng(4).normal(size=vocab)).float() * scale
    sampled = read_vocabulary(z.expand(count, -1), draws(count, seed=17)).sampled_ids
    _assert_distributed(sampled, z.double().softmax(-1))


def test_draws_from_the_full_vocabulary_are_distributed_as_the_softmax() -> None:
    """Binned by the position inside a block, and by the block; each draw within 1e-8 of the token's share of float64 sums.

    A float32 running sum over the blocks is off by up to 3e-8.
    """
    z = torch.from_numpy(np.random.default_rng(5).normal(size=2**18)).float()
    uniform = draws(384, seed=3)
    batches = uniform.split(64)
    sampled = torch.cat([read_vocabulary(z.expand(64, -1), batch).sampled_ids for batch in batches])
    shares = z.double().softmax(-1)
    upper = shares.cumsum(-1)[sampled]
    assert (uniform > upper - shares[sampled] - 1e-8).all() and (uniform < upper + 1e-8).all()
    p = shares.reshape(-1, BLOCK)
    _assert_distributed(sampled % BLOCK // 32, p.sum(0).reshape(-1, 32).sum(-1))
    _assert_distributed(sampled // BLOCK // 32, p.sum(1).reshape(-1, 32).sum(-1))


def _assert_distributed(sampled: Tensor, p: Tensor) -> None:
    """Chi-square, tokens expected fewer than five times taken together."""
    expected = p.numpy() * len(sampled)
    found = np.bincount(sampled.numpy(), minlength=len(p))
    rare = expected < 5
    observed = np.append(found[~rare], found[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] < 5:
        observed, wanted = np.append(observed[:-2], observed[-2:].sum()), np.append(wanted[:-2], wanted[-2:].sum())
    assert stats.chisquare(observed, wanted / wanted.sum() * observed.sum()).pvalue > 0.01


@pytest.mark.parametrize("vocab", [V, 3 * BLOCK + 1])
def test_impossible_tokens_are_never_drawn(vocab: int) -> None:
    z = torch.full((6, vocab), -torch.inf)
    possible = [{3}, {0, vocab - 1}, {vocab - 1}, {5, 6}, {0}, {vocab - 2}]
    for row, tokens in enumerate(possible):
        z[row, list(tokens)] = 1.0
    for value in (0.0, 2**-24, 0.5, LARGEST):
        read = read_vocabulary(z, torch.full((6,), value))
        for tokens, sampled in zip(possible, read.sampled_ids.tolist(), strict=True):
            assert sampled == (min(tokens) if value < 0.5 else max(tokens))
        assert read.entropy.tolist() == pytest.approx([np.log(len(tokens)) for tokens in possible], abs=1e-6)
        assert read.best_logprob.isfinite().all() and read.probabilities.isfinite().all()


def test_one_hot_rows_have_no_entropy_and_give_their_token() -> None:
    z = torch.full((3, 1300), -80.0)
    z[[0, 1, 2], [0, 600, 1299]] = 80.0
    for value in (0.0, 0.3, LARGEST):
        read = read_vocabulary(z, torch.full((3,), value))
        assert read.sampled_ids.tolist() == read.best_ids.tolist() == [0, 600, 1299]
        assert read.entropy.tolist() == [0.0] * 3 and not read.entropy.signbit().any()
        assert read.best_logprob.tolist() == [0.0] * 3


def test_the_extremes_of_a_draw_give_the_first_and_last_possible_token() -> None:
    z = random_logits(6, vocab=1300) / 12
    z[:, :2] = z[:, -3:] = -torch.inf
    assert read_vocabulary(z, torch.zeros(T)).sampled_ids.tolist() == [2] * T
    flat = torch.where(z.isinf(), z, 0.0)
    assert read_vocabulary(flat, torch.full((T,), LARGEST)).sampled_ids.tolist() == [1296] * T


def test_draws_that_rounding_leaves_without_a_token_get_the_last_possible_of_their_block() -> None:
    """A target that the block's sum exceeds but the running sum inside it never does."""
    p = torch.tensor([[0.5, 0.25, 0.0, 0.0]], dtype=torch.float64)
    assert _first_beyond(p.cumsum(-1), torch.tensor([0.75], dtype=torch.float64), p).tolist() == [1]
    rng = np.random.default_rng(8)
    for _ in range(20):
        z = torch.from_numpy(rng.normal(size=(256, 2 * BLOCK))).float()
        z[:, BLOCK - 5 : BLOCK] = -torch.inf
        read = read_vocabulary(z, torch.full((256,), LARGEST))
        assert (read.probabilities.gather(-1, read.sampled_ids[:, None]) > 0).all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "all -inf"])
def test_a_broken_row_shows_in_its_entropy_and_in_no_other(broken: float) -> None:
    z = random_logits(9)
    whole = read_vocabulary(z, draws(T))
    z[4, :] = broken if broken == -torch.inf else z[4]
    z[4, 77] = broken
    read = read_vocabulary(z, draws(T))
    assert read.entropy[4].isnan()
    others = torch.arange(T) != 4
    for name in ("best_ids", "sampled_ids", "entropy", "best_logprob", "probabilities", "total"):
        assert torch.equal(getattr(read, name)[others], getattr(whole, name)[others])


def test_a_row_reads_the_same_alone_as_among_others() -> None:
    z, uniform = random_logits(10, vocab=1300), draws(T)
    whole = read_vocabulary(z, uniform)
    for row in range(T):
        alone = read_vocabulary(z[row : row + 1], uniform[row : row + 1])
        assert alone.sampled_ids[0] == whole.sampled_ids[row]
        assert alone.entropy[0] == pytest.approx(float(whole.entropy[row]), abs=1e-6)


def test_the_logits_are_left_as_they_were() -> None:
    z = random_logits(11)
    before = z.clone()
    read_vocabulary(z, draws(T))
    assert torch.equal(z, before)
