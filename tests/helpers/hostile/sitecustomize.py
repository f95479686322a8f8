"""On the path of a node, this makes its clients lie, as the environment's HOSTILE says."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
from pathlib import Path
from typing import Any

BEHAVIOUR = os.environ.get("HOSTILE", "")


def lying(real: Any) -> Any:
    from fedfactor.protocol.message import Message, decode, encode

    def work(setup: Any, job: Any, *rest: Any) -> Any:
        reply, new = real(setup, job, *rest)
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
        elif BEHAVIOUR == "large":
            return reply + os.urandom(64 << 20), new
        elif BEHAVIOUR == "sleep":
            time.sleep(float(os.environ["HOSTILE_SECONDS"]))
        else:
            raise ValueError(f"no such behaviour: {BEHAVIOUR}")
        return encode(Message(message.kind, fields, tensors)), new

    return work


class Lies(importlib.abc.MetaPathFinder):
    """Changes the node's module when it is imported, and not before: Flower must hear from the process first."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "fedfactor.runs.flower.node":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.work = lying(module.work)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if BEHAVIOUR and any(Path(word).name == "flwr-clientapp" for word in sys.orig_argv):
    os.environ.pop("FEDFACTOR_WORKER", None)  # its worker would not lie
    sys.meta_path.insert(0, Lies())
