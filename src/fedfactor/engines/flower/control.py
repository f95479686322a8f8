"""A client of a SuperLink: register and list nodes, start and stop runs, follow their progress.

It sends the same requests as the `flwr` command, without a process for each. These parts of Flower are not public: only
this module uses them, and `tests/engines/flower/test_control.py` fails if one of them changes.
"""

from __future__ import annotations

import hashlib
import re
import ssl
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.federation_config_pb2 import SimulationConfig
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedfactor.engines.flower.programs import DeploymentError


@dataclass(frozen=True)
class RegisteredNode:
    """A node whose key is registered, so that it may join."""

    id: int
    name: str
    status: str
    """`registered` (never connected), `online` or `offline`."""
    key: bytes


@dataclass(frozen=True)
class RunProgress:
    """Status of a Flower run."""

    status: str
    """`pending`, `starting`, `running`, `finished:completed`, `finished:failed` or `finished:stopped`."""
    details: str
    bytes_down: int
    """Bytes sent to the nodes, as counted by Flower."""
    bytes_up: int

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.status.startswith("finished")


class NoAnswer(DeploymentError):
    """The SuperLink cannot be reached or failed to answer; the request can be repeated."""


class Hopeless(str):
    """A reason for which trying again is pointless."""

    __slots__ = ()


PATIENCE = 5.0
"""Seconds that a server has to answer whether it is up."""


def unreachable(address: str, authority: Path) -> str:
    """Return why no SuperLink with a certificate of this authority answers at an address; empty if one does."""
    trust = ssl.create_default_context(cafile=str(authority))
    try:
        answer = httpx.get(f"https://{address}/health", verify=trust, timeout=PATIENCE)
    except httpx.TransportError as error:
        return wrong_certificate(str(error), address) or (
            f"cannot reach the server at {address} ({error or type(error).__name__}): check the address, the port and "
            "the firewall, and that `fedfactor flower up` is running"
        )
    return "" if answer.is_success else f"{address} is not a SuperLink: it answered {answer.status_code} to /health"


def wrong_certificate(said: str, address: str) -> Hopeless | None:
    """Return in words that a server's certificate is not trusted, if an error says so."""
    if "certificate verify failed" not in said.lower():
        return None
    found = re.search(r"certificate verify failed: ([^\n(\]]+)", said)
    return Hopeless(
        f"the certificate of the server at {address} does not match ca.crt"
        f"{f' ({found[1].strip()})' if found else ''}: check that the address was given to `up --host`, and that "
        "ca.crt is the one of the server's site"
    )


class Control:
    """A connection to a SuperLink; uses TLS if a certificate is given."""

    def __init__(self, address: str, authority: Path | None) -> None:
        self.address = address
        self._client = ControlHttpClient.from_server_address(
            address,
            authority is None,
            None if authority is None else authority.read_bytes(),
            [RuntimeVersionHttpInterceptor(component_name="fedfactor")],
        )

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def answers(self) -> bool:
        """Return whether the SuperLink is up."""
        try:
            return bool(self._client._client.get(f"{self._client._base_url}/health").is_success)
        except httpx.TransportError:
            return False

    def register(self, public_key: Path, name: str) -> int:
        """Register a public key, so that its node may join; return the node id."""
        return int(self._ask("RegisterNode", RegisterNodeRequest(public_key=key_bytes(public_key), name=name)).node_id)

    def unregister(self, node: int) -> None:
        """Remove a node's key, so that it may no longer join."""
        self._ask("UnregisterNode", UnregisterNodeRequest(node_id=node))

    def nodes(self) -> list[RegisteredNode]:
        """Return all nodes that may join, ordered by name."""
        listed = self._ask("ListNodes", ListNodesRequest()).nodes_info
        found = [RegisteredNode(one.node_id, one.name, one.status, one.public_key) for one in listed]
        return sorted((one for one in found if one.status != "unregistered"), key=lambda one: one.name)

    def start(
        self, app: Path, config: Mapping[str, str | int | float | bool], *, nodes: int = 0, gpus: float = 0.0
    ) -> int:
        """Start a run of an app folder and return its id.

        A simulation has `nodes` nodes, each of which needs the fraction `gpus` of a GPU.
        """
        # One core per node, since training uses one thread; Flower's default is two.
        simulated = SimulationConfig(num_supernodes=nodes, client_resources_num_cpus=1, client_resources_num_gpus=gpus)
        request = StartRunRequest(
            fab=bundle(app),
            override_config=user_config_to_proto(dict(config)),
            federation="",
            override_federation_config=simulated if nodes else None,
        )
        answer = self._ask("StartRun", request)
        if not answer.HasField("run_id"):
            raise DeploymentError(f"the SuperLink at {self.address} did not accept the app in {app}")
        return int(answer.run_id)

    def progress(self, run: int) -> RunProgress:
        """Return the status of a run."""
        runs = self._ask("ListRuns", ListRunsRequest(run_id=run)).run_dict
        if run not in runs:
            raise DeploymentError(
                f"the SuperLink at {self.address} has no run {run}: was it replaced by another SuperLink?"
            )
        found = runs[run]
        status = ":".join(filter(None, [found.status.status, found.status.sub_status]))
        return RunProgress(status, found.status.details, found.bytes_sent, found.bytes_recv)

    def stop(self, run: int) -> None:
        """Stop a run."""
        self._ask("StopRun", StopRunRequest(run_id=run))

    def _ask(self, method: str, request: Any) -> Any:
        try:
            return getattr(self._client, method)(request)
        except httpx.HTTPStatusError as error:
            if error.response.is_server_error:  # for example, its database is locked
                raise NoAnswer(
                    f"the SuperLink at {self.address} failed to answer {method}: {error.response.status_code}"
                ) from None
            told = FlowerError.from_json(error.response.text)
            reason = f"{told.message} {told.public_details or ''}".strip() if told else error.response.text[:300]
            raise DeploymentError(f"the SuperLink at {self.address} refused {method}: {reason}") from None
        except httpx.TransportError as error:
            raise NoAnswer(f"no answer from a SuperLink at {self.address}: {error}") from None


def bundle(app: Path) -> Any:
    """Pack an app folder in the format that a SuperLink accepts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised inside Flower
        content = build_fab_from_disk(app)
    return fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))


def key_bytes(public_key: Path) -> bytes:
    """Return a public key in the form by which the SuperLink identifies nodes."""
    try:
        key = load_ssh_public_key(public_key.read_bytes())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("Flower accepts keys of elliptic curves only")
        return bytes(public_key_to_bytes(key))
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise DeploymentError(
            f"{public_key} is not the public key of a node ({error}); `fedfactor flower join` creates one, NAME.pub"
        ) from None
