"""Options of `data prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wgpu_lora.data.validation_split import check_split
from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import flag, setting

MIN_SIMILARITY = 0.65  # of near duplicates
DUPLICATES = ("normalized", "exact", "keep")


@dataclass(frozen=True)
class Preparation:
    """Options.

    exclude: glob patterns of files to leave out. preferences_from: of the files that may give pairs and labelled
    answers; by default all. duplicates: which are removed: equal ones after normalising, exactly equal ones, or none.
    near_duplicates: least similarity of near duplicates, which are removed, too. strip_system, drop_thinking: remove
    system messages, and reasoning from answers. enable_thinking: of the chat template, for rows that do not set it.
    max_characters: of a row. validation_split: share or number of rows held out. group_by: column; rows with the same
    value are held out together. overwrite: replace an earlier result.
    """

    exclude: Sequence[str] = ()
    preferences_from: Sequence[str] = ()
    duplicates: str = DUPLICATES[0]
    near_duplicates: float | None = None
    strip_system: bool = False
    drop_thinking: bool = False
    enable_thinking: bool | None = None
    max_characters: int | None = None
    validation_split: float | None = None
    group_by: str | None = None
    seed: int = 42
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.duplicates not in DUPLICATES:
            raise UserError(
                f"{flag('duplicates')} must be one of {', '.join(DUPLICATES)}, not {self.duplicates!r:.40}."
            )
        if self.near_duplicates is not None:
            if not MIN_SIMILARITY <= self.near_duplicates <= 1:
                option_text = setting("near_duplicates", self.near_duplicates)
                raise UserError(f"{option_text} must be a similarity from {MIN_SIMILARITY} to 1, such as 0.8.")
            if self.duplicates == "keep":
                raise UserError(
                    f"{setting('duplicates', 'keep')} keeps what {flag('near_duplicates')} removes: leave one out."
                )
        if self.max_characters is not None and self.max_characters < 1:
            raise UserError(f"{flag('max_characters')} must be at least 1, not {self.max_characters}.")
        if self.seed < 0:
            raise UserError(f"{flag('seed')} must be at least 0, not {self.seed}.")
        if self.validation_split is not None:
            check_split(self.validation_split)
        elif self.group_by is not None:
            raise UserError(f"{flag('group_by')} goes with {flag('validation_split')}: give both.")
