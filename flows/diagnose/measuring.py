"""Rules over benchmarks: overlap with training, answers cut off there, gains that are noise."""

import math
from collections.abc import Iterator

from flows.diagnose.evidence import Evaluated, Evidence
from flows.diagnose.finding import Finding, Weight


def overlap(evidence: Evidence) -> Iterator[Finding]:
    """Problems that are trained on and measured with."""
    texts = {_plain(text): prompt for prompt, text in evidence.trained.items()}
    for benchmark in evidence.config.evaluate.benchmarks:
        found = next((e for e in evidence.evaluated if e.benchmark == benchmark.name), None)
        if found is None:
            continue
        same = found.problems & set(evidence.trained)
        asked = {_plain(question) for question in found.questions}
        shared = same | {texts[text] for text in asked & set(texts)}
        share = len(shared) / max(1, len(found.problems))
        if len(shared) >= 3 and share > 0.02:
            yield Finding(
                "overlap",
                "",
                Weight.BROKEN,
                share / 2,
                f"{len(shared)} of the {len(found.problems)} problems of benchmark {benchmark.name} were trained on",
                "its accuracy measures memory: the gain is not one on new problems",
                "take another split for the benchmark (split: held_out), or remove its rows from problems",
                [f"{prompt}: {evidence.trained[prompt][:70]!r}" for prompt in sorted(shared)[:3]],
            )


def cut_off(evidence: Evidence) -> Iterator[Finding]:
    """Benchmarks whose responses are cut off, or not read, more than those of training."""
    for each in evidence.evaluated:
        limit = next(b.max_tokens for b in evidence.config.evaluate.benchmarks if b.name == each.benchmark)
        trained_cut = evidence.recent(each.agent, "generate/truncated_share") or 0.0
        trained_unread = evidence.recent(each.agent, "verify/unparseable_share") or 0.0
        if each.cut_off > 0.2 and each.cut_off > trained_cut + 0.15:
            yield _finding(
                "benchmark_cut_off",
                each,
                each.cut_off,
                f"{each.cut_off:.0%} of the responses to {each.benchmark} are cut off at {limit} tokens, "
                f"{trained_cut:.0%} in training",
                "the benchmark's max_tokens is too small, so its accuracy is too low",
                f"set its max_tokens to {evidence.config.generation(each.agent).max_tokens}, as in training",
            )
        elif each.unparseable > 0.3 and each.unparseable > trained_unread + 0.25:
            yield _finding(
                "benchmark_not_read",
                each,
                each.unparseable,
                f"no answer is found in {each.unparseable:.0%} of the responses to {each.benchmark}, "
                f"{trained_unread:.0%} in training",
                "the benchmark asks in another form than training does",
                "give the benchmark the prompt of problems",
            )


def _finding(rule: str, each: Evaluated, strength: float, what: str, cause: str, remedy: str) -> Finding:
    line = f"evaluate {each.agent} {each.benchmark} after {each.step} iterations: {each.responses} responses"
    return Finding(rule, each.agent, Weight.MEASURING, strength, what, cause, remedy, [line])


def learned_by_heart(evidence: Evidence) -> Iterator[Finding]:
    """Reward that rises in training while the benchmark falls beyond its noise."""
    for (agent, benchmark), points in evidence.accuracy.items():
        if len(points) < 2:
            continue
        (_, before, low, _), (_, now, _, high) = points[0], points[-1]
        rise = (evidence.recent(agent, "verify/reward_mean") or 0.0) - (
            evidence.first(agent, "verify/reward_mean") or 0.0
        )
        if rise > 0.1 and high < low:
            yield Finding(
                "learned_by_heart",
                agent,
                Weight.MEASURING,
                0.9,
                f"the training reward rose by {rise:.2f}, and {benchmark} fell from {before:.1%} to {now:.1%}",
                f"the {len(evidence.trained)} training problems are learned by heart, or reward something else",
                "train on more problems, or stop at the best version: @best",
                [f"accuracy of {agent} on {benchmark}: " + " ".join(f"{a:.3f}" for _, a, _, _ in points)],
            )


def noise(evidence: Evidence) -> Iterator[Finding]:
    """A gain that is smaller than the benchmark's noise, where the benchmark is too small to show it."""
    sizes = {(e.agent, e.benchmark): len(e.problems) for e in evidence.evaluated}
    for (agent, benchmark), points in evidence.accuracy.items():
        if len(points) < 2 or (agent, benchmark) not in sizes or evidence.done < evidence.config.iterations:
            continue
        (_, before, *_), (_, now, *_) = points[0], points[-1]
        size = sizes[agent, benchmark]
        deviation = math.sqrt((before * (1 - before) + now * (1 - now)) / size)
        gain = now - before
        if 0.01 < gain < 1.96 * deviation and deviation > 0.04:
            need = math.ceil(size * (1.96 * deviation / gain) ** 2)
            yield Finding(
                "gain_within_noise",
                agent,
                Weight.MEASURING,
                0.3,
                f"{benchmark} went from {before:.1%} to {now:.1%} on {size} problems; the noise of this difference is "
                f"±{1.96 * deviation:.1%} (95 %)",
                "the benchmark is too small to show this gain",
                f"give the benchmark about {need} problems, or compare several seeds: hacrl sweep",
                [f"accuracy of {agent} on {benchmark}: " + " ".join(f"{a:.3f}" for _, a, _, _ in points)],
            )


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


RULES = (overlap, cut_off, learned_by_heart, noise)
