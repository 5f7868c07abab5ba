"""Default maximum length of rows: as the model allows or, for evaluation, as the adapter was trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wgpu_lora.data import Row, TokenizedData
from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import read_json
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.train.option_types import check
from wgpu_lora.train.options.training_arguments import LENGTH, TrainingArguments
from wgpu_lora.train.run.records import RUN
from wgpu_lora.train.run.run_checkpoint import METADATA

# How rows are encoded if neither the user nor an adapter specifies it.
ROWS: dict[str, Any] = {
    "on_overflow": "truncate",
    "completion_only_loss": True,
    "enable_thinking": None,
    "template_date": None,
}


@dataclass(frozen=True)
class EvaluationRowOptions:
    """How rows are encoded for evaluation; `note` names unusual choices, or is ''."""

    max_length: int
    on_overflow: str
    completion_only_loss: bool
    enable_thinking: bool | None
    template_date: str | None
    note: str


def fit_length(args: TrainingArguments, positions: int) -> tuple[TrainingArguments, str]:
    """The options with a max_length that fits the model's number of positions, and a note.

    Raises:
        UserError: max_length was given and is larger.
    """
    if args.max_length is None:
        length = min(LENGTH, positions)
        note = f"rows of at most {length:,} tokens, the number of positions of this model" if length < LENGTH else ""
        return replace(args, max_length=length), note
    _refuse_longer(args.max_length, positions)
    return args, ""


def shortened(prepared: TokenizedData, args: TrainingArguments) -> TokenizedData:
    """Rows as they would be with a smaller max_length, for planning; their summary stays the same."""
    length, drop = args.length, args.on_overflow == "drop"

    def cut(row: Row) -> Row:
        return replace(row, input_ids=row.input_ids[:length], labels=row.labels[:length])

    rows_by_sample = {}
    for number, rows in enumerate(prepared.samples):
        shorter = [cut(row) for row in rows]
        all_trained = all(row.trained_tokens for row in shorter)
        if all_trained and not (drop and any(len(row.input_ids) > length for row in rows)):
            rows_by_sample[number] = shorter
    if not rows_by_sample:
        raise UserError(f"{setting('max_length', length)} leaves no row with trained tokens: raise it.")
    values = tuple(prepared.values[number] for number in rows_by_sample) if prepared.values else ()
    columns = tuple(prepared.columns[number] for number in rows_by_sample) if prepared.columns else ()
    remaining = [row for rows in rows_by_sample.values() for row in rows]
    keys = prepared.keys[[*rows_by_sample]] if len(prepared.keys) else prepared.keys
    return replace(prepared, rows=remaining, values=values, columns=columns, max_length=length, keys=keys)


def evaluation_rows(options: Mapping[str, Any], adapters: Sequence[str | Path], positions: int) -> EvaluationRowOptions:
    """How to encode rows for evaluation: as in `options`, else as the adapters were trained, else as the model allows.

    Args:
        options: max_length and the names in ROWS; None means unset.
        positions: of the model.

    Raises:
        UserError: a value is invalid.
    """
    rows = check_rows(options)
    trained = _common_options([_trained_with(Path(adapter)) for adapter in adapters])
    of_adapters = {name: value for name, value in trained.items() if name not in rows}
    length = of_adapters.pop("max_length", None)
    notes = [setting(name, value) for name, value in of_adapters.items() if value != ROWS[name]]
    if "max_length" in rows:
        _refuse_longer(rows["max_length"], positions)
    elif length is not None and length <= positions:
        rows["max_length"] = length
        notes[:0] = [setting("max_length", length)] if length != min(LENGTH, positions) else []
    note = f"{', '.join(notes)}, as in training" if notes else ""
    if "max_length" not in rows:
        rows["max_length"] = min(LENGTH, positions)
        if rows["max_length"] < LENGTH:
            short = f"rows of at most {positions:,} tokens, the number of positions of this model"
            note = f"{short}; {note}" if note else short
    return EvaluationRowOptions(**{**ROWS, **of_adapters, **rows}, note=note)


def check_rows(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of max_length and ROWS that are set. Raises UserError if no model allows a value."""
    recorded = {name: value for name in ("max_length", *ROWS) if (value := options.get(name)) is not None}
    for name, value in recorded.items():
        check(name, value, TrainingArguments.__dataclass_fields__[name].metadata)
    return recorded


def _refuse_longer(length: int, positions: int) -> None:
    if length > positions:
        raise UserError(
            f"{setting('max_length', length)} is more than this model's {positions} positions: lower it to "
            f"{positions}, or leave {flag('max_length')} out."
        )


def _trained_with(adapter: Path) -> dict[str, Any]:
    """The training options of an adapter, from its run.json or its checkpoint's metadata.json.

    These files are untrusted: a file with an invalid value is ignored.
    """
    for name in (RUN, METADATA):
        try:
            options = read_json(adapter / name).get("options")
            if isinstance(options, dict):
                return _valid_options(options)
        except UserError:
            continue
    return {}


def _valid_options(options: Mapping[str, Any]) -> dict[str, Any]:
    declared, result = TrainingArguments.__dataclass_fields__, {}
    for name in ("max_length", *ROWS):
        value = options.get(name)
        kind = {"max_length": int, "on_overflow": str, "template_date": str}.get(name, bool)
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            check(name, value, declared[name].metadata)
            result[name] = value
    return result


def _common_options(trained: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings for adapters that are evaluated on the same rows: those they agree on, and the longest length."""
    if not trained or not all(trained):
        return {}
    agreed = {
        name: value for name, value in trained[0].items() if all(options.get(name) == value for options in trained)
    }
    lengths = [options["max_length"] for options in trained if "max_length" in options]
    return agreed | ({"max_length": max(lengths)} if lengths else {})
