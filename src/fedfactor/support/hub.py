"""Models of the Hugging Face hub, downloaded once per machine."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fedfactor.support.install import optional

PREFIX = "huggingface:"


def split_name(name: str) -> tuple[str, str | None] | None:
    """Return the id and the revision of `huggingface:OWNER/NAME@REVISION`; `None` if this is no such name."""
    if not name.startswith(PREFIX):
        return None
    model, _, revision = name.removeprefix(PREFIX).partition("@")
    return model, revision or None


@cache
def local_folder(name: str, *files: str) -> str:
    """Return the local folder of a model of the hub, with these of its files; other names are returned as they are.

    Files are downloaded unless they are in the hub's cache. Raise ValueError if that fails.
    """
    if (found := split_name(name)) is None:
        return name
    hub = optional("huggingface_hub", "tune", f"the model {name}")
    try:
        (folder,) = {Path(hub.hf_hub_download(found[0], file, revision=found[1])).parent for file in files}
    except Exception as error:  # of several libraries, without a common class
        reason = str(error).strip().partition("\n")[0]
        wanted = " and ".join(files)
        raise ValueError(
            f"{wanted} of {name} could not be taken from the Hugging Face hub: {reason}. Without a network, put the "
            "model's files into a folder and name it instead"
        ) from None
    return str(folder)
