"""Certificates and keys made by us, judged by the standard library's TLS and by what Flower loads keys with."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedfactor.engines.flower.certificates import check_certificate, node_key, server_certificates


def handshake(made: Path, trusted: Path, name: str) -> str:
    """Return the TLS version of a handshake over loopback, or raise as a client would."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made / "server.crt", made / "server.key")
    client = ssl.create_default_context(cafile=str(trusted / "ca.crt"))
    left, right = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(right, server_side=True) as end:
                end.recv(1)
        except (ssl.SSLError, ConnectionError):
            right.close()  # the client says why

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(left, server_hostname=name) as end:
            return str(end.version())
    finally:
        left.close()
        thread.join()


def test_a_server_is_known_by_its_authority_under_its_names_only(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    server_certificates(ours, ["server.example.org", "10.1.2.3"], 2)
    server_certificates(theirs, ["server.example.org"], 2)
    assert handshake(ours, ours, "server.example.org").startswith("TLS")
    assert handshake(ours, ours, "10.1.2.3").startswith("TLS")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(ours, ours, "other.example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(theirs, ours, "server.example.org")


def test_a_certificate_ends(tmp_path: Path) -> None:
    server_certificates(tmp_path, ["localhost"], 0)  # valid from an hour ago until now
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake(tmp_path, tmp_path, "localhost")


def test_a_certificate_that_no_node_would_accept_is_named(tmp_path: Path) -> None:
    made = server_certificates(tmp_path / "site", ["server.example.org", "10.1.2.3"], 2)
    check_certificate(made.certificate, ["10.1.2.3"])
    with pytest.raises(ValueError, match=r"is not valid for other\.example\.org: remove ca\.crt"):
        check_certificate(made.certificate, ["server.example.org", "other.example.org"])
    made = server_certificates(tmp_path / "old", ["a"], 0)
    with pytest.raises(ValueError, match="expired on"):
        check_certificate(made.certificate, ["a"])


def test_keys_are_secret_and_stay(tmp_path: Path) -> None:
    public = node_key(tmp_path / "keys" / "one")
    private = load_ssh_private_key((tmp_path / "keys" / "one").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.public_key() == load_ssh_public_key(public.read_bytes())
    assert (tmp_path / "keys" / "one").stat().st_mode & 0o777 == 0o600
    before = public.read_bytes()
    assert node_key(tmp_path / "keys" / "one").read_bytes() == before
    assert server_certificates(tmp_path / "site", ["a"], 1).key.stat().st_mode & 0o777 == 0o600
