"""On the path of a process, this writes down whom it calls and what it starts, into the file that WATCHED names."""

from __future__ import annotations

import ipaddress
import json
import os
import sys
from typing import Any


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        address = arguments[1]
        told = str(address[0]) if isinstance(address, tuple) else "local"
    elif event == "socket.getaddrinfo":
        told = str(arguments[0])
    elif event == "subprocess.Popen":
        told = " ".join(str(word) for word in arguments[1][:2])
    else:
        return
    line = json.dumps({"event": event, "to": told, "by": " ".join(sys.orig_argv[:3])}) + "\n"
    handle = os.open(os.environ["WATCHED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, line.encode())  # one write: lines of many processes do not mix
    os.close(handle)


def is_here(name: str) -> bool:
    """Tell whether a name or address is this machine's own."""
    if name in ("localhost", "local", "None", ""):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


if "WATCHED" in os.environ:
    sys.addaudithook(watch)
