"""Where a webhook may connect to: decided from the address itself, never from how it is written.

Promise: unless the operator allowed it, no address is let through that leads back into our own
network: private, loopback, link-local, shared, multicast, reserved, a cloud's metadata, or any
of these inside an IPv6 address. What is not plainly public is refused. No I/O.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from postroom.errors import ConfigurationError

__all__ = ["Allowed", "check_host", "why_refused"]

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_HTTPS_PORT, _HTTP_PORT, _FIRST_USER_PORT = 443, 80, 1024
# An unusual label is no danger by itself; these are what resolvers and certificates agree on.
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_LONGEST_HOST = 253

_METADATA = "a metadata service"
# The registries of IANA for special purposes, and what clouds put on addresses that look public.
_REFUSED: tuple[tuple[Network, str], ...] = tuple(
    (ipaddress.ip_network(network), why)
    for network, why in (
        # First, since these stand inside ranges that a name on the allow-list may lead to.
        ("100.100.100.200/32", _METADATA),
        ("168.63.129.16/32", _METADATA),
        ("fd00:ec2::/32", _METADATA),
        ("fd20:ce::254/128", _METADATA),
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared (CGNAT)"),
        ("127.0.0.0/8", "loopback"),
        ("169.254.0.0/16", "link-local, where metadata services are"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved"),
        ("192.0.2.0/24", "reserved for documentation"),
        ("192.88.99.0/24", "a relay of 6to4"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "reserved for benchmarks"),
        ("198.51.100.0/24", "reserved for documentation"),
        ("203.0.113.0/24", "reserved for documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("::ffff:0:0/96", "IPv4 inside IPv6"),
        ("::/96", "IPv4 inside IPv6"),
        ("64:ff9b:1::/48", "a private NAT64"),
        ("2001::/32", "Teredo"),
        ("2001::/23", "reserved"),
        ("2001:db8::/32", "reserved for documentation"),
        ("2002::/16", "6to4"),
        ("3fff::/20", "reserved for documentation"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "site-local"),
        ("ff00::/8", "multicast"),
    )
)
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)
# What a name on the allow-list may stand for: a place inside, but never the machine's own metadata.
_INSIDE = ("private", "loopback", "shared (CGNAT)")


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the operator allows besides the public: networks, and hosts with or without a port."""

    networks: tuple[Network, ...] = ()
    hosts: frozenset[str] = frozenset()

    @classmethod
    def of(cls, entries: Iterable[str]) -> Allowed:
        """From words such as `10.1.0.0/16`, `192.168.1.7`, `hooks.internal`, `localhost:8080`."""
        networks: list[Network] = []
        hosts: set[str] = set()
        for entry in (entry.strip() for entry in entries):
            try:
                networks.append(ipaddress.ip_network(entry))
            except ValueError:
                host, _, port = entry.partition(":")
                if not _is_name(host) or (":" in entry and not port.isdecimal()):
                    raise ConfigurationError(
                        f"allow={entry!r}: write a network as 10.1.0.0/16, an address, "
                        "or a host as hooks.internal or hooks.internal:8443"
                    ) from None
                hosts.add(entry.lower())
        return cls(tuple(networks), frozenset(hosts))

    def names(self, host: str, port: int) -> bool:
        """Whether this host, by its name, is allowed on this port."""
        return host in self.hosts or f"{host}:{port}" in self.hosts

    def covers(self, address: Address, *, alone: bool = False) -> bool:
        """Whether this very address is allowed; `alone`: by itself, not as one of a network."""
        return any(
            address in network and (not alone or network.num_addresses == 1)
            for network in self.networks
        )


def check_host(host: str, port: int, allowed: Allowed) -> str:
    """The host in lower case, or `ConfigurationError` if nobody should connect to it.

    A number is an address only in the one form that every parser reads alike, so 127.1, 0177.0.0.1
    and 2130706433 are refused before anybody resolves them.
    """
    host = host.lower()
    address = literal(host)
    named = allowed.names(host, port) or (address is not None and allowed.covers(address))
    if address is None:
        _check_name(host, named)
    elif why := why_refused(address, host, port, allowed):
        raise ConfigurationError(f"{why}; {_HOW_TO_ALLOW}")
    if port not in (_HTTPS_PORT, _HTTP_PORT) and port < _FIRST_USER_PORT and not named:
        raise ConfigurationError(
            f"port {port} belongs to another service; use 443 or one from {_FIRST_USER_PORT} up, "
            f"or allow it with allow={host}:{port}"
        )
    return host


_HOW_TO_ALLOW = "if it is meant, name it in the option allow="


def _check_name(host: str, named: bool) -> None:
    if not host.isascii():
        raise ConfigurationError(f"write the host {host!r} in its ASCII form, as xn--…")
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1] or (labels[-2] if len(labels) > 1 else "")):
        raise ConfigurationError(
            f"{host!r} is a number in a form that is read in different ways; write four decimal "
            "numbers, as in 192.0.2.1"
        )
    if not _is_name(host):
        raise ConfigurationError(f"{host!r} is no host name; leave out a dot at its end")
    if len(labels) == 1 and not named:
        raise ConfigurationError(
            f"{host!r} is a name inside your own network, not a public one; {_HOW_TO_ALLOW}"
        )


def _is_name(host: str) -> bool:
    return len(host) <= _LONGEST_HOST and all(_LABEL.fullmatch(part) for part in host.split("."))


def literal(host: str) -> Address | None:
    """The address, if the host is written as one."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def why_refused(address: Address, host: str, port: int, allowed: Allowed) -> str | None:
    """Why nobody may connect to this address as `host`; None: they may."""
    kind = _kind(address)
    if kind is None:
        return None
    # Nobody means the machine's own secrets who allows the network they happen to lie in.
    if allowed.covers(address, alone="metadata" in kind) and not _has_zone(address):
        return None
    if kind in _INSIDE and allowed.names(host, port):
        return None
    shown = f"{host} is at {address}" if str(address) != host else host
    return f"{shown}, which is not a public address ({kind})"


def _has_zone(address: Address) -> bool:
    return isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None


def _kind(address: Address) -> str | None:
    """What makes an address other than public; None: it is public."""
    if _has_zone(address):
        return "bound to an interface"
    if isinstance(address, ipaddress.IPv6Address) and address in _NAT64:
        # On a network without IPv4 this is how public hosts are reached; judge the one inside.
        kind = _kind(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        return f"{kind}, behind NAT64" if kind else None
    for network, why in _REFUSED:
        if address in network:
            return why
    if isinstance(address, ipaddress.IPv6Address):
        if address not in _PUBLIC_V6:
            return "reserved"
        if int(address) >> 32 & 0xFFFF_FFFF in _ISATAP:
            return "IPv4 inside IPv6"
    return None
