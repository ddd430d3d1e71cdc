"""A server's certificate: its files are looked at now and then, and taken once they are whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cache.server.certificate import Certificate
from stoker.cache.server.settings import ServerTlsFiles
from stoker.errors import ConfigError
from tests.certificates import Authority
from tests.clocks import HandClock

SOON_S = 0.9
"""Too soon to look again."""
LATER_S = 1.1


class Served:
    """What a server has, all of it by one authority; and another one."""

    def __init__(self, folder: Path) -> None:
        self.authority, self.other = Authority(folder / "1"), Authority(folder / "2")
        certificate, key = self.authority.server()
        self.files = ServerTlsFiles(certificate, key, self.authority.path, True)
        self.clock = HandClock()
        self.certificate = Certificate(self.files, self.clock)

    def looks(self, after_s: float = LATER_S) -> bool:
        self.clock.at += after_s
        return self.certificate.look()


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


def test_files_that_stay_as_they_are_are_not_read_again(served: Served) -> None:
    context = served.certificate.context
    assert not any(served.looks() for _ in range(3))
    assert served.certificate.context is context


def test_a_renewed_certificate_is_taken_at_the_next_look(served: Served) -> None:
    context = served.certificate.context
    for made, used in zip(served.other.server(), served.files, strict=False):
        assert isinstance(used, Path)
        made.replace(used)
    assert not served.looks(SOON_S)
    assert served.looks(LATER_S - SOON_S)
    assert served.certificate.context is not context
    assert not served.looks()


def test_other_authorities_of_clients_are_taken(served: Served) -> None:
    context = served.certificate.context
    served.other.path.replace(served.authority.path)
    assert served.looks()
    assert served.certificate.context is not context


def test_a_certificate_is_taken_once_its_key_is_there(served: Served) -> None:
    """Who renews both does not do it at once; what is there between is no certificate with its key."""
    context = served.certificate.context
    certificate, key = served.other.server()
    certificate.replace(served.files.certificate)
    for _ in range(3):
        assert not served.looks()
        assert "the one before is used" in (served.certificate.problem or "")
        assert served.certificate.context is context
    key.replace(served.files.key)
    assert served.looks()
    assert served.certificate.problem is None
    assert served.certificate.context is not context


@pytest.mark.parametrize("field", ["certificate", "key", "client_ca"])
def test_without_one_of_its_files_there_is_none(served: Served, field: str) -> None:
    path = getattr(served.files, field)
    path.unlink()
    with pytest.raises(ConfigError, match=path.name):
        Certificate(served.files, served.clock)
