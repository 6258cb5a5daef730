"""Text files of sequences: CSV streams, and the .ts files of the time series archive."""

from __future__ import annotations

import csv
from collections.abc import Sequence

import numpy as np

from ._files import Name, existing, layout_error, regular


def read_csv(path: Name, columns: Sequence[str | int] | None = None) -> np.ndarray:
    """Read a stream from a CSV file, one line per step.

    Args:
        path: the file; its first line is a header if it has no number.
        columns: which ones, by the header's names or by number from 0; default all. All of them
            are numbers, and `nan` is one: a column of dates has to be left out.

    Returns:
        Values, (T, C).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a column or a number is missing.
    """
    path = existing(path, "a stream")
    regular(path)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            lines = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise layout_error(path, "this is no table of text.", str(error)) from error
    header = lines.pop(0)[1] if lines and not any(map(_is_number, lines[0][1])) else []
    if not lines:
        raise layout_error(path, "there are no numbers.", "a line is a step, and there is none")
    width = len(header or lines[0][1])
    places: dict[str | int, int] = {c: c for c in range(width)}
    places |= {name: c for c, name in enumerate(header)}
    wanted = range(width) if columns is None else columns
    if missing := [c for c in wanted if c not in places]:
        names = ", ".join(header) or f"0 to {width - 1}"
        raise layout_error(path, f"there is no column {missing[0]!r}.", f"the columns are {names}")
    numbers = [places[c] for c in wanted]
    for n, row in lines:
        if any(cell.strip() for cell in row[width:]):
            why = f"the first line has {width}: a comma inside of a number or a name, perhaps"
            raise layout_error(path, f"line {n} has {len(row)} columns.", why)
        for c in numbers:
            if c >= len(row) or not _is_number(row[c]):
                name = header[c] if header else c
                what = f"line {n} has {row[c]!r}" if c < len(row) else f"line {n} has nothing"
                raise layout_error(
                    path, f"{what} in column {name!r}.", "it is no number; `columns` says which "
                    "columns are read"
                )  # fmt: skip
    return np.array([[float(row[c]) for c in numbers] for _, row in lines])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_ts(path: Name) -> tuple[list[np.ndarray], list[str]]:
    """Read labelled series from a `.ts` file of the time series classification archive.

    A line has the values of each channel, with colons between channels, and the label.

    Args:
        path: the file, without time stamps and missing values.

    Returns:
        Series (T, C), whose lengths may differ, and the name of the class of each.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another layout.
    """
    path = existing(path, "a .ts file")
    regular(path)
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise layout_error(path, "this is no text.", str(error)) from error
    head = [line.lower().split() for line in lines if line.startswith("@")]
    if ["@data"] not in head or ["@timestamps", "true"] in head:
        raise layout_error(
            path,
            "there is no line @data." if ["@data"] not in head else "the series have time stamps.",
            "series without time stamps follow a line @data",
        )
    start = [line.lower() for line in lines].index("@data") + 1
    series, labels = [], []
    for n, line in enumerate(lines[start:], start + 1):
        if line:
            *channels, label = line.split(":")
            try:
                values = [[float(x) for x in channel.split(",")] for channel in channels]
                if len({*map(len, values)}) != 1 or np.isnan(values).any():
                    raise ValueError("a value is missing")
                series.append(np.array(values, float).T)
            except ValueError as error:
                raise layout_error(
                    path, f"line {n} is no series: {error}.",
                    "a line has numbers of equally long channels, and the label"
                ) from error  # fmt: skip
            labels.append(label)
    return series, labels
