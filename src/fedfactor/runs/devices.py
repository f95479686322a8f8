"""Reading the devices of a fleet from a file with one line per client."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

from fedfactor.protocol.fleet import Device
from fedfactor.support.checks import near


def read_devices(path: Path | str) -> dict[str, Any]:
    """Read a CSV file whose rows are the clients' devices; return the arguments `devices` and `of_clients` of a Fleet.

    The columns are fields of `Device`, and `name` if the devices should have names; an empty cell is not given. Clients
    with equal rows share a kind of device. Raise ValueError if the file does not exist or a device is wrong.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            table = csv.DictReader(file, strict=True)
            rows = [{key: value for key, value in row.items() if value} for row in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"the devices cannot be read from {path}: {error}") from None
    legal = ["name", *(field.name for field in dataclasses.fields(Device))]
    for column in table.fieldnames or ():
        if column not in legal:
            raise ValueError(f"{path} has a column {column!r}; {near(column, legal)}legal are {', '.join(legal)}")
    devices: dict[str, Device] = {}
    of_clients = []
    for number, row in enumerate(rows):
        name = row.pop("name", "") or "-".join([row.get("profile", "device"), *_own_numbers(row)])
        try:
            given: dict[str, Any] = {key: _value(text) for key, text in row.items()}
            device = Device(**given)
        except ValueError as error:
            raise ValueError(f"{path}, client {number}: {error}") from None
        if devices.setdefault(name, device) != device:
            raise ValueError(f"{path}, client {number}: another row gives device {name!r} other numbers")
        of_clients.append(name)
    if not rows:
        raise ValueError(f"{path} has no rows: give a header with fields of a device, and one row per client")
    return {"devices": devices, "of_clients": tuple(of_clients)}


def _own_numbers(row: dict[str, str]) -> list[str]:
    return [text for key, text in row.items() if key != "profile"]


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
