"""Runs that differ in their seeds only, as a line of a table each."""

from __future__ import annotations

from ntkmarglik.runs import records

SHOWN = {
    "test_log_likelihood": 3,
    "test_accuracy": 2,
    "test_ece": 3,
    "train_log_likelihood": 3,
    "log_marglik": 3,
}


def table(rows: list[records.Row]) -> str:
    """Means over seeds with standard errors, in Markdown."""
    headings = (
        "data, model",
        "estimator",
        "seeds",
        "test log-lik.",
        "test acc. %",
        "test ECE",
        "train log-lik.",
    )
    lines = [f"| {' | '.join(headings)} | log evidence / datum |", "|---" * 8 + "|"]
    groups = records.grouped(rows, "dataset", "model", "n_data", "estimator", "augment")
    for (dataset, model, n_data, estimator, augment), members in groups.items():
        label = estimator + (", affine" if augment == "affine" else "")
        percent = {"test_accuracy": 100}
        cells = [
            records.as_text(
                [percent.get(name, 1) * value for value in records.values(members, name)], digits
            )
            for name, digits in SHOWN.items()
        ]
        status = members[0]["log_marglik_status"]
        status = "" if status == "approximation" else f" ({status})"
        lines.append(
            f"| {dataset}-{n_data}, {model} | {label} | {len(members)} | "
            f"{' | '.join(cells)}{status} |"
        )
    return "\n".join(lines)
