"""Columns of numbers from a CSV file, with errors that name file, line and field."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Column(NamedTuple):
    """A column that must be there, and what its values must be."""

    name: str
    least: float = 0
    most: float = math.inf
    is_whole: bool = True


class Row(NamedTuple):
    """A line's values in the order of the columns, and where it stands."""

    place: str
    values: tuple[float, ...]


def read_table(path: Path, columns: Sequence[Column], error: type[ValueError]) -> list[Row]:
    """All rows of a file with a header line; further columns are ignored.

    Raises:
        error: the file can't be read, a column is missing or there twice, or a value isn't valid.
    """
    names = [column.name for column in columns]
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = list(reader.fieldnames or ())
            missing = [name for name in names if name not in header]
            twice = [name for name in names if header.count(name) > 1]
            if missing:
                raise error(
                    f"{path}: column {', '.join(missing)} is missing; expected {','.join(names)}"
                )
            if twice:
                raise error(f"{path}: column {', '.join(twice)} is there more than once")
            rows = []
            for row in reader:
                place = f"{path}:{reader.line_num}"
                numbers = (_number(place, column, row[column.name], error) for column in columns)
                rows.append(Row(place, tuple(numbers)))
            return rows
    except (OSError, UnicodeDecodeError, csv.Error) as fault:
        raise error(f"{path}: can't be read: {fault}") from fault


def _number(place: str, column: Column, text: str | None, error: type[ValueError]) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    is_valid = math.isfinite(value) and column.least <= value <= column.most
    if not is_valid or (column.is_whole and value != int(value)):
        kind = "a whole number" if column.is_whole else "a number"
        bounds = f" and <= {column.most:g}" if column.most < math.inf else ""
        raise error(f"{place}: {column.name}={text!r} is not {kind} >= {column.least:g}{bounds}")
    return value
