"""A certificate authority of a test's own, and what it signs."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class Authority:
    """Its own certificate lies in `folder/NAME.pem`; what it issues beside it, with its key behind it in `….key`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self._certificate = (
            _begun(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def server(self, name: str = "server", *hosts: str) -> tuple[Path, Path]:
        """Of a server at these hosts, `localhost` and 127.0.0.1 without any: its certificate and its key."""
        return self._issue(name, [_host(host) for host in hosts or ("localhost", "127.0.0.1")], None)

    def client(self, name: str, *, uri: str = "", dns: str = "") -> tuple[Path, Path]:
        """Of a client with that common name."""
        names: list[x509.GeneralName] = [x509.DNSName(dns)] if dns else []
        names += [x509.UniformResourceIdentifier(uri)] if uri else []
        return self._issue(name, names, _name(name))

    def _issue(
        self, file: str, names: list[x509.GeneralName], subject: x509.Name | None
    ) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        usage = ExtendedKeyUsageOID.SERVER_AUTH if subject is None else ExtendedKeyUsageOID.CLIENT_AUTH
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        made = (
            _begun(subject or _name("server"), self._name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(issuer, critical=False)
        )
        if names:
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        path, key_path = self._folder / f"{file}.pem", self._folder / f"{file}.key"
        written = made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _put(key_path, secret)
        _put(path, written)
        return path, key_path


def _put(path: Path, data: bytes) -> None:
    """All at once, as those who renew certificates do."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    new.replace(path)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=30))
    )
