"""What a run has learned, and what may be tried next, in sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from ntkmarglik.learn.methods import METHODS
from ntkmarglik.problem.augment import RANGES
from ntkmarglik.runs.loggers import Metrics
from ntkmarglik.runs.report import RANGE_LABELS, Runs, course, status

SAME = 1.1  # factors below it are no change that a reader would care about
TOLD = 3  # layers that changed most; the plot has the others
SMALL = 0.02  # a range below it moves no pixel of a picture of 28 x 28 by half its width
OFF = 1e3  # a weight decay that grew so much holds its layer near zero
RISING = 0.01  # nats per datum from one fifth of a run to the next


def learned(runs: Runs) -> list[str]:
    """The findings of the first run, and how it compares with the others."""
    (label, (lines, summary)), *others = runs.items()
    sentences = [*_evidence(lines, summary), *_precisions(summary), *_augmentation(lines, summary)]
    sentences += _rest(summary)
    for other, (_, compared) in others:
        sentences += _comparison(label, summary, other, compared)
    return sentences or ["Nothing has been recorded yet."]


def fold(before: float, now: float) -> str:
    """A change of a positive number: "rose 40-fold"."""
    if not (before > 0 and now > 0 and math.isfinite(before) and math.isfinite(now)):
        return f"went from {before:.3g} to {now:.3g}"
    ratio = max(now / before, before / now)
    if ratio < SAME:
        return "stayed about as it was"
    verb = "rose" if now > before else "fell"
    if ratio < 2:
        return f"{verb} by {100 * abs(now / before - 1):.0f} %"
    if ratio >= 1e6:
        power = round(math.log10(ratio))
        return f"{verb} by {power} powers of ten"
    return f"{verb} {ratio:,.0f}-fold" if ratio >= 10 else f"{verb} {ratio:.1f}-fold"


def layers(summary: Metrics) -> dict[str, float]:
    """The prior precision of each layer's weights, as layers are counted from the input on."""
    precisions = summary.get("prior_precision") or {}
    weights = {name: value for name, value in precisions.items() if name.endswith("weight")}
    numbered = enumerate((weights or precisions).items(), 1)
    return {f"layer {number} ({name})": value for number, (name, value) in numbered}


def _evidence(lines: list[Metrics], summary: Metrics) -> Iterator[str]:
    _, values = course(lines, "log_marglik")
    last = summary.get("log_marglik")
    if last is None:
        return
    what = status(summary)
    if len(values) > 1:
        yield (
            f"The log evidence per datum went from {values[0]:.3f} to {last:.3f}; "
            f"this number is {what}."
        )
    else:
        yield f"The log evidence per datum is {last:.3f}; this number is {what}."


def _precisions(summary: Metrics) -> Iterator[str]:
    found = layers(summary)
    start = summary.get("initial_prior_precision")
    if not found or not _learns(summary):
        return
    if start is None:
        yield (
            "The weight decay of every layer follows from its weights in closed form: between "
            f"{min(found.values()):.3g} and {max(found.values()):.3g}."
        )
        return
    if len(found) > 1 and max(found.values()) < SAME * min(found.values()):
        value = next(iter(found.values()))
        yield f"The weight decay of all layers {fold(start, value)} ({start:.3g} to {value:.3g})."
        return
    order = sorted(found, key=lambda name: -_distance(start, found[name]))
    for name in order[:TOLD]:
        number, _, tensor = name.partition(" (")
        change = fold(start, found[name])
        yield f"The weight decay of {number} ({tensor} {change}, {start:.3g} to {found[name]:.3g}."
    if order[TOLD:]:
        low, high = (f(found[name] for name in order[TOLD:]) for f in (min, max))
        rest = len(order[TOLD:])
        if rest == 1:
            yield f"That of the other layer ended at {low:.3g}."
        else:
            yield f"Those of the other {rest} layers ended between {low:.3g} and {high:.3g}."


def _distance(before: float, now: float) -> float:
    """How far a positive number went, in powers of e."""
    return abs(math.log(max(now, 1e-300) / max(before, 1e-300))) if math.isfinite(now) else math.inf


def _augmentation(lines: list[Metrics], summary: Metrics) -> Iterator[str]:
    ranges = summary.get("augmentation")
    if not ranges or not _learns(summary):
        return
    sizes = {name: abs(value) for name, value in zip(RANGES, ranges, strict=True)}
    large = {name: value for name, value in sizes.items() if value >= SMALL}
    if large:
        yield f"Invariances were learned: {', '.join(_size(*item) for item in large.items())}."
    none = [RANGE_LABELS[name] for name in sizes if name not in large]
    if none:
        yield f"Next to none: {', '.join(none)}."


def _size(name: str, value: float) -> str:
    """A range as a person would give it."""
    label = RANGE_LABELS[name]
    if name == "rotation":
        degrees = math.degrees(value)
        return "rotation by any angle" if degrees > 175 else f"{label} up to ±{degrees:.0f}°"
    if name in ("tx", "ty"):  # a picture reaches from -1 to 1
        return f"{label} up to ±{50 * value:.0f} % of the picture"
    return f"{label} up to ±{100 * value:.0f} %"


def _rest(summary: Metrics) -> Iterator[str]:
    temperature = summary.get("temperature", 1.0)
    if temperature != 1:
        yield f"The temperature of the likelihood is {temperature:.3g}."
    network = summary.get("test_ece")
    probit = summary.get("probit_test_ece")
    if network is not None and probit is not None:
        better = "less" if probit < network else "more"
        yield (
            f"The posterior's probabilities are off by {100 * probit:.1f} points on average, "
            f"{better} than those of the network alone ({100 * network:.1f})."
        )
    total = summary.get("seconds_total")
    hyper = summary.get("seconds_hyper")
    if total and hyper:
        yield (
            f"Learning hyperparameters took {100 * hyper / total:.0f} % of the run's {total:.0f} s."
        )


def _comparison(label: str, summary: Metrics, other: str, compared: Metrics) -> Iterator[str]:
    ours, theirs = summary.get("test_log_likelihood"), compared.get("test_log_likelihood")
    if ours is None or theirs is None:
        return
    word = "better" if ours > theirs else "worse"
    if abs(ours - theirs) < 5e-4:
        word = "no different"
    yield (
        f"On test data, {label} has a log-likelihood {word} than {other} "
        f"({ours:.3f} against {theirs:.3f} per datum), with "
        f"{100 * summary.get('test_accuracy', math.nan):.1f} % right against "
        f"{100 * compared.get('test_accuracy', math.nan):.1f} %."
    ).replace("no different than", "no different from that of")


def _learns(summary: Metrics) -> bool:
    method = str(summary.get("method"))
    return method in METHODS and METHODS.named(method).learns()


def next_steps(runs: Runs, *, finished: bool = True) -> list[str]:
    """What the numbers of the first run suggest."""
    lines, summary = next(iter(runs.values()))
    steps = []
    if not finished:
        steps.append("This run has not come to its end: continue it with --resume.")
    if summary.get("method") in METHODS and not _learns(summary):
        steps.append("Nothing but the weights was learned here: --method ntk learns weight decay.")
    elif finished:
        steps += _of_learning(lines, summary)
    steps.append("One run is one draw: try other seeds with --seed before believing a difference.")
    if len(runs) <= 2:
        steps.append("Compare runs in one page: python scripts/report.py RUN OTHER-RUN")
    return steps


def _still_rises(values: list[float]) -> bool:
    """Whether the mean of the last fifth is above that of the fifth before, beyond their noise."""
    count = len(values) // 5
    if count < 2:  # no noise can be told from two numbers
        return False
    before, after = values[-2 * count : -count], values[-count:]
    variances = statistics.variance(before) + statistics.variance(after)
    rise = statistics.mean(after) - statistics.mean(before)
    return rise > RISING + 2 * math.sqrt(variances / count)


def _of_learning(lines: list[Metrics], summary: Metrics) -> Iterator[str]:
    _, values = course(lines, "log_marglik")
    if _still_rises(values):
        yield "The evidence was still rising at the end: train for longer (--epochs)."
    start = summary.get("initial_prior_precision")
    held = [name for name, value in layers(summary).items() if start and value > OFF * start]
    if held:
        yield f"The prior holds {', '.join(held[:TOLD])} near zero: a smaller network may do."
    in_blocks = METHODS.named(summary["method"]).uses_blocks()
    subset, n_data = summary.get("subset") or 0, summary.get("n_data") or 0
    if in_blocks and 0 < subset < n_data and summary.get("log_marglik_status") != "exact":
        yield f"Larger blocks than {subset} data give a tighter evidence (--subset, --outputs)."
    if summary.get("augmentation") is None:
        yield "Learn invariances, too: --augment affine."
