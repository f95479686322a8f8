"""On the path of a node, this makes its clients lie, as the environment's HOSTILE says."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

BEHAVIOUR = os.environ.get("HOSTILE", "")


def lying(real: Any) -> Any:
    from fedfactor.wire import Message, decode, encode

    def work(setup: Any, job: Any, state: Any, room: Any = None) -> Any:
        reply, new = real(setup, job, state)
        message = decode(bytearray(reply))
        fields, tensors = dict(message.fields), {name: tensor.clone() for name, tensor in message.tensors.items()}
        first = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
        if BEHAVIOUR == "nan":
            tensors[first].flatten()[0] = float("nan")
        elif BEHAVIOUR == "shape":
            tensors[first] = tensors[first].flatten()[:-1]
        elif BEHAVIOUR == "foreign":
            fields["client"] = (fields["client"] + 1) % 4
        elif BEHAVIOUR == "garbage":
            return b"\x00garbage" * 100, new
        elif BEHAVIOUR == "sleep":
            time.sleep(float(os.environ["HOSTILE_SECONDS"]))
        else:
            raise ValueError(f"no such behaviour: {BEHAVIOUR}")
        return encode(Message(message.kind, fields, tensors)), new

    return work


if BEHAVIOUR and any(Path(word).name == "flwr-clientapp" for word in sys.orig_argv):
    from fedfactor.flower import node

    node.work = lying(node.work)
