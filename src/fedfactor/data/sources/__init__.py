"""Data sets, read from the files that their authors distribute; nothing is ever unpickled."""

from fedfactor.data.sources import cifar, demo, folders, huggingface, leaf, mnist, text
from fedfactor.data.sources.registry import MissingData, Source, checked_source, data_folder, info, load, names

__all__ = [
    "MissingData",
    "Source",
    "checked_source",
    "cifar",
    "data_folder",
    "demo",
    "folders",
    "huggingface",
    "info",
    "leaf",
    "load",
    "mnist",
    "names",
    "text",
]
