# ruff: noqa: RUF001, SIM905
"""Addresses that a webhook must never reach, in every notation we know of.

`urls()` are whole URLs with PORT where the port of a trap stands. Whatever name they hold is
resolved to loopback by the tests, so that only a check can keep a connection from being made.
"""

import ipaddress
from collections.abc import Iterator

V4 = """
    0.0.0.0 0.0.0.1 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 100.127.255.254 127.0.0.1
    127.0.0.53 127.1.2.3 127.255.255.254 168.63.129.16 169.254.0.1 169.254.169.254 169.254.170.2
    172.16.0.1 172.17.0.1 172.31.255.255 192.0.0.8 192.0.0.192 192.0.2.1 192.88.99.1 192.168.0.1
    192.168.255.255 198.18.0.1 198.19.255.255 198.51.100.7 203.0.113.9 224.0.0.1 239.255.255.250
    240.0.0.1 255.255.255.255
""".split()

V6 = """
    :: ::1 0:0:0:0:0:0:0:1 0000:0000:0000:0000:0000:0000:0000:0001 ::2 ::ffff:ffff 100::1
    100:0:0:1::1 64:ff9b:1::1 2001:: 2001::1 2001:2::1 2001:10::1 2001:20::1 2001:db8::1 2002::1
    3fff::1 4000::1 5f00::1 8000::1 c000::1 fc00::1 fd00::1 fd00:ec2::254 fd20:ce::254
    fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff fe80::1 fe80::a9fe:a9fe febf::1 fec0::1 feff::1 ff00::1
    ff02::1 ff05::2 ff0e::1 fe80::1%25lo fe80::1%lo ::1%25lo 2606:4700::1%251 ::1%1
""".split()

# Where clouds tell a machine its secrets: AWS, ECS, EKS, Google, Azure and Alibaba.
METADATA = """
    169.254.169.254 169.254.170.2 169.254.170.23 168.63.129.16 100.100.100.200 fd00:ec2::254
    fd00:ec2::23 fd20:ce::254
""".split()

# Inside, and worth hiding: loopback, metadata, and the three private ranges.
PRIZES = ["127.0.0.1", "169.254.169.254", "10.0.0.1", "192.168.1.1", "172.16.0.1"]


def numbers(text: str) -> Iterator[str]:
    """The forms in which inet_aton, and so many a resolver, reads an IPv4 address."""
    a, b, c, d = (int(part) for part in text.split("."))
    whole = int(ipaddress.IPv4Address(text))
    yield from (str(whole), hex(whole), f"0{whole:o}", hex(whole).upper().replace("X", "x"))
    yield from (f"{a}.{whole & 0xFFFFFF}", f"{a}.{b}.{c * 256 + d}", f"0x{a:x}.{b}.{c}.{d}")
    yield from (f"0{a:o}.0{b:o}.0{c:o}.0{d:o}", f"0x{a:02x}.0x{b:02x}.0x{c:02x}.0x{d:02x}")
    yield from (f"{a:03}.{b:03}.{c:03}.{d:03}", f"0x{a:x}.{whole & 0xFFFFFF}")
    yield from (f"{text}.", f"{a}.{b}.{c}.0x{d:x}", f"{whole + 2**32}", f"0x1{whole:08x}")


def embedded(text: str) -> Iterator[str]:
    """The forms in which an IPv6 address holds an IPv4 address."""
    whole = int(ipaddress.IPv4Address(text))
    high, low = f"{whole >> 16:x}", f"{whole & 0xFFFF:x}"
    yield from (f"::ffff:{text}", f"::ffff:{high}:{low}", f"::{text}", f"::ffff:0:{text}")
    yield from (f"64:ff9b::{text}", f"64:ff9b::{high}:{low}", f"64:ff9b:1::{text}")
    yield from (f"2002:{high}:{low}::1", f"2001:0:{high}:{low}::1")
    flipped = whole ^ 0xFFFFFFFF
    yield f"2001:0:1:2::{flipped >> 16:x}:{flipped & 0xFFFF:x}"
    yield from (f"2606:4700::5efe:{text}", f"2606:4700::200:5efe:{text}")


NAMES = """
    localhost LOCALHOST localhost. localhost.localdomain ip6-localhost ip6-loopback broadcasthost
    foo.localhost a.b.localhost localtest.me 127.0.0.1.nip.io 127-0-0-1.sslip.io 7f000001.nip.io
    customer1.app.localhost.my.company.example spoofed.burpcollaborator.example lvh.me
    metadata metadata. metadata.google.internal metadata.google.internal. METADATA.google.internal
    instance-data instance-data.ec2.internal metadata.azure.internal metadata.packet.net
    rancher-metadata kubernetes.default.svc kubernetes.default.svc.cluster.local
    consul.service.consul vault internal intranet router gateway.docker.internal
    host.docker.internal printer.local server.lan db.corp rebind.example example.com
    xn--localhost-n0a.example 1u.ms make-127-0-0-1-rr.1u.ms
""".split()

LOOKALIKES = [
    "①②⑦.⓪.⓪.①",
    "１２７.０.０.１",
    "127。0。0。1",
    "127．0．0．1",
    "127｡0｡0｡1",
    "ⓛⓞⓒⓐⓛⓗⓞⓢⓣ",
    "𝟙𝟚𝟟.𝟘.𝟘.𝟙",
    "١٢٧.٠.٠.١",
    "loc\u00adalhost",
    "localhost\u200b",
    "ｌocalhost",
    "ʟocalhost",
    "①⑥⑨.②⑤④.①⑥⑨.②⑤④",
    "0ⅹ7f.1",
]

TRICKS = [
    "https://example.com@127.0.0.1:PORT/",
    "https://example.com:443@127.0.0.1:PORT/",
    "https://example.com:pass@127.0.0.1:PORT/",
    "https://example.com%40127.0.0.1:PORT/",
    "https://127.0.0.1:PORT@localhost:PORT/",
    "https://a@b@127.0.0.1:PORT/",
    "https://127.0.0.1:PORT\\@example.com/",
    "https://example.com\\@127.0.0.1:PORT/",
    "https://example.com\\.127.0.0.1:PORT/",
    "https:\\\\127.0.0.1:PORT\\",
    "https:/\\127.0.0.1:PORT/",
    "https:127.0.0.1:PORT/",
    "https:///127.0.0.1:PORT/",
    "https:////127.0.0.1:PORT/",
    "https://:PORT/",
    "https://",
    "https:///",
    "https://127.0.0.1 :PORT/",
    "https:// 127.0.0.1:PORT/",
    "https://127.0.0.1\t:PORT/",
    "https://127.0.\n0.1:PORT/",
    "https://127.0.0.1\r\n:PORT/",
    "https://127.0.0.1\x00.example.com:PORT/",
    "https://127.0.0.1%00.example.com:PORT/",
    "https://127.0.0.1%2f.example.com:PORT/",
    "https://127.0.0.1%23.example.com:PORT/",
    "https://%31%32%37.0.0.1:PORT/",
    "https://%6c%6f%63%61%6c%68%6f%73%74:PORT/",
    "https://[::1]example.com:PORT/",
    "https://example.com[::1]:PORT/",
    "https://[[::1]]:PORT/",
    "https://[::1:PORT/",
    "https://::1]:PORT/",
    "https://::1:PORT/",
    "https://[127.0.0.1]:PORT/",
    "https://[v1.127.0.0.1]:PORT/",
    "https://[localhost]:PORT/",
    "https://127.0.0.1:PORT:443/",
    "https://127.0.0.1:+PORT/",
    "https://127.0.0.1:0PORT/",
    "https://127.0.0.1:PORT#@example.com/",
    "https://127.0.0.1:PORT?@example.com/",
    "https://127.0.0.1:PORT;@example.com/",
    "https://example.com;127.0.0.1:PORT/",
    "https://example.com,127.0.0.1:PORT/",
    "https://127.0.0.1,example.com:PORT/",
    "https://127..0.0.1:PORT/",
    "https://.127.0.0.1:PORT/",
    "https://*:PORT/",
    "https://*.localhost:PORT/",
    "https://{topic}:PORT/",
    "https://-:PORT/",
    "https://example..com:PORT/",
    "http://127.0.0.1:PORT/",
    "http://localhost:PORT/",
    "http://example.com:PORT/",
    "HTTPS://127.0.0.1:PORT/",
    "httpS://LocalHost:PORT/",
    "gopher://127.0.0.1:PORT/_",
    "file://127.0.0.1/etc/passwd",
    "file:///etc/passwd",
    "ftp://127.0.0.1:PORT/",
    "dict://127.0.0.1:PORT/",
    "unix:///var/run/docker.sock",
    "https+unix://%2Fvar%2Frun%2Fdocker.sock/",
    "//127.0.0.1:PORT/",
    "127.0.0.1:PORT/",
    "https://example.com:22/",
    "https://example.com:25/",
    "https://example.com:0/",
    "https://example.com:65536/",
    "https://example.com:-1/",
    "https://example.com:/",
    "https://example.com:4４3/",
]


def urls() -> list[str]:
    """Every one of them once."""
    found = [f"https://{host}:PORT/hook" for host in V4]
    found += [f"https://[{host}]:PORT/hook" for host in V6]
    found += [f"https://{f'[{host}]' if ':' in host else host}:PORT/hook" for host in METADATA]
    for prize in PRIZES:
        found += [f"https://{host}:PORT/hook" for host in numbers(prize)]
        found += [f"https://[{host}]:PORT/hook" for host in embedded(prize)]
    found += [f"https://{host}:PORT/hook" for host in (*NAMES, *LOOKALIKES)]
    return list(dict.fromkeys(found + TRICKS))


# What a name server may answer for a name that looks harmless.
ANSWERS: list[list[str]] = [
    *([address] for address in V4),
    *([address] for address in V6 if "%25" not in address),
    *([address] for address in METADATA),
    *([address] for prize in PRIZES for address in embedded(prize)),
    # Both outside and inside: whichever is tried first, the other is what was meant.
    ["93.184.216.34", "127.0.0.1"],
    ["127.0.0.1", "93.184.216.34"],
    ["2606:2800:220:1::1", "::1"],
    ["93.184.216.34", "169.254.169.254"],
    ["93.184.216.34", "::ffff:10.0.0.1"],
    ["not an address"],
    ["127.1"],
    [""],
]
