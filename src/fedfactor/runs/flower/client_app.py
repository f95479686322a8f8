"""The ClientApp, which a SuperNode runs in a process of its own for each message.

If the node has a worker, this process only passes the message on to it and imports no torch. Otherwise it does the work
itself.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedfactor.engines.flower.adapter import ClientApp, Context, Message, pack, unpack
from fedfactor.engines.flower.warm import WORKER, ask


def answer(message: Message, context: Context) -> Message:
    """Answer a message; errors are described in the answer, because Flower's own errors contain less."""
    try:
        data, fields = unpack(message.content)
        asked = {"kind": message.metadata.message_type, "fields": fields}
        asked |= {"run": dict(context.run_config), "node": dict(context.node_config)}
        if worker := os.environ.get(WORKER):
            replied, reply_bytes = ask(Path(worker), asked, data)
        else:
            from fedfactor.runs.flower.node import reply  # imports torch

            replied, reply_bytes = reply(asked, None if data is None else bytearray(data))  # writable, for the decoder
    except Exception as error:  # a failed client must not affect the others
        replied, reply_bytes = {"failure": f"{type(error).__name__}: {error}"}, None
    return Message(pack(reply_bytes, replied), reply_to=message)


app = ClientApp()
app.train()(answer)
app.query()(answer)
