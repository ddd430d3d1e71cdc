"""From where a request comes, as logs say it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from stoker.errors import ConfigError

UNIX = "unix"
"""The address of who is on this machine, at the Unix socket."""
FORWARDED = b"x-forwarded-for"
_FORWARDED_MAX = 32
"""More proxies, one behind the other, are not looked at."""
_Address = IPv4Address | IPv6Address


class ClientAddresses:
    """`proxies`: networks in CIDR notation, addresses, or `unix`, of those who are believed when they say for whom they
    ask. Raises ConfigError."""

    def __init__(self, proxies: Sequence[str] = ()) -> None:
        self._trusts_unix = UNIX in proxies
        self._networks: list[IPv4Network | IPv6Network] = []
        for text in proxies:
            if text == UNIX:
                continue
            try:
                self._networks.append(ip_network(text))
            except ValueError as error:
                raise ConfigError(
                    f"--trusted-proxy {text!r} is no network such as 10.1.0.0/16, no address, and not {UNIX!r}: {error}"
                ) from error

    def of(self, peer: str, forwarded: str | None) -> str:
        """Who asks. `peer`: who is connected, empty at the Unix socket; `forwarded`: the header X-Forwarded-For, to
        which each proxy has added whom it was asked by. It is read from its end, as far as proxies are trusted: what
        stands before that anybody may have written."""
        found = None if not peer else _address(peer)
        client = UNIX if not peer else peer if found is None else str(found)
        is_trusted = self._trusts_unix if not peer else self._trusts(found)
        if forwarded is None or not is_trusted:
            return client
        for text in reversed(forwarded.split(",")[-_FORWARDED_MAX:]):
            found = _address(text.strip())
            if found is None:
                break
            client = str(found)
            if not self._trusts(found):
                break
        return client

    def _trusts(self, address: _Address | None) -> bool:
        return address is not None and any(address in network for network in self._networks)


def _address(text: str) -> _Address | None:
    """With or without a port; an IPv4 address in an IPv6 one is that."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ip_address(text)
    except ValueError:
        return None
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found
