"""Whom clients trust: files that are read again, and what went wrong in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cache.client.connection import Endpoint
from stoker.errors import ConfigError
from stoker.settings import ClientTlsFiles, cache_settings
from stoker.wire.tls import ClientTls, explained
from tests.certificates import Authority


def test_files_are_read_again_when_they_have_changed(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "1"), Authority(tmp_path / "2")
    tls = ClientTls(ClientTlsFiles(str(first.path)))
    context = tls.context()
    assert tls.context() is context
    second.path.replace(first.path)
    renewed = tls.context()
    assert renewed is not context
    first.path.write_text("nothing")
    assert tls.context() is renewed, "what was there before is used"
    with pytest.raises(ConfigError, match=r"STOKER_CACHE_CA=.* holds no certificates"):
        ClientTls(ClientTlsFiles(str(first.path))).context()


def test_a_certificate_of_ours_is_read_again_with_its_key(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "1"), Authority(tmp_path / "2")
    certificate, key = first.client("me")
    tls = ClientTls(ClientTlsFiles(str(first.path), str(certificate), str(key)))
    context = tls.context()
    renewed, renewed_key = second.client("me")
    renewed.replace(certificate)
    assert tls.context() is context, "it is not this key's"
    renewed_key.replace(key)
    assert tls.context() is not context


def test_a_certificate_of_ours_needs_its_key(tmp_path: Path) -> None:
    certificate, key = map(str, Authority(tmp_path).client("me"))
    ClientTls(ClientTlsFiles("", certificate, key)).context()
    (tmp_path / "both.pem").write_bytes(Path(certificate).read_bytes() + Path(key).read_bytes())
    ClientTls(ClientTlsFiles("", str(tmp_path / "both.pem"))).context()
    for files in (
        ClientTlsFiles("", certificate),
        ClientTlsFiles("", certificate, str(tmp_path / "none")),
        ClientTlsFiles("", "", key),
    ):
        with pytest.raises(ConfigError, match="STOKER_CACHE_CERT"):
            ClientTls(files).context()


def test_settings_say_where_the_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE_CA", "ca.pem")
    monkeypatch.setenv("STOKER_CACHE_CERT", "me.pem")
    monkeypatch.setenv("STOKER_CACHE_CERT_KEY", "me.key")
    assert cache_settings().tls == ClientTlsFiles("ca.pem", "me.pem", "me.key")


def test_endpoints_with_and_without_tls() -> None:
    found = [Endpoint(url).is_tls for url in ("https://a:1", "http://a:1", "unix:///a")]
    assert found == [True, False, False]
    for wrong in ("https://a", "https://a:1/b", "ftp://a:1"):
        with pytest.raises(ConfigError, match="is not a cache endpoint"):
            Endpoint(wrong)


def test_errors_say_what_to_do() -> None:
    assert "write http://" in explained(OSError("[SSL: WRONG_VERSION_NUMBER] wrong version number"))
    assert "--tls-client-ca" in explained(OSError("[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca"))
    required = OSError("[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert certificate required")
    assert "set STOKER_CACHE_CERT" in explained(required)
    assert explained(ConnectionResetError("it closed the connection")) == "it closed the connection"
    assert explained(EOFError()) == "EOFError"
