"""Clients on Flower's nodes: transport and processes. Nothing else in the package knows flwr."""

from importlib.util import find_spec

from fedfactor.support.install import install_command

if missing := [name for name in ("flwr", "httpx", "cryptography", "psutil") if find_spec(name) is None]:
    raise ImportError(f"Flower needs {', '.join(missing)}; install it with {install_command('flower')}")
