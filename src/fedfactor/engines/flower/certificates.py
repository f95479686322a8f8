"""Certificates of the server and keys of the nodes."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True)
class Certificates:
    """Files of a server: the authority's certificate, which every node needs, and the server's certificate and key."""

    authority: Path
    certificate: Path
    key: Path


def server_certificates(folder: Path, hosts: Sequence[str], days: int) -> Certificates:
    """Create an authority and a certificate for the names and addresses under which nodes reach the server.

    The authority's key is used once and not stored, so nobody can issue another certificate that nodes accept.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = Certificates(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedfactor authority")])
    authority = (
        _about(name, name, authority_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    certificate = (
        _about(subject, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_named(host) for host in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    found.authority.write_bytes(authority.public_bytes(Encoding.PEM))
    found.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
    write_secret(found.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return found


def check_authority(path: Path) -> None:
    """Raise ValueError if a file is not the certificate of an authority."""
    try:
        x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not a certificate ({error}): copy ca.crt from the server's site folder, and name it with --ca"
        ) from None


def check_certificate(path: Path, hosts: Sequence[str]) -> None:
    """Raise ValueError if a server's certificate has expired or lacks one of these names and addresses."""
    found = x509.load_pem_x509_certificate(path.read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    renew = f"remove ca.crt, server.crt and server.key in {path.parent}, start again and copy ca.crt to the nodes"
    missing = [host for host in hosts if _named(host) not in names]
    if missing:
        raise ValueError(f"{path} is not valid for {', '.join(missing)}: {renew}")
    if found.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise ValueError(f"{path} expired on {found.not_valid_after_utc:%d %B %Y}: {renew}")


def _about(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of other machines may be slow
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _named(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def node_key(path: Path) -> Path:
    """Create a node's private key and public key unless they exist; return the path of the public key."""
    public = path.with_name(path.name + ".pub")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = ec.generate_private_key(ec.SECP384R1())
        public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
        write_secret(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return public


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
