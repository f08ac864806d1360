"""URLs, hosts and addresses of webhooks: what is not plainly allowed is refused."""

from __future__ import annotations

import random
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest

from loraplex.platform.errors import WebhookHostNotAllowed, WebhookUrlInvalid
from loraplex.platform.webhooks.target import TargetPolicy, parse_allowed_host, parse_url

ALLOWED = ("hooks.example.com", "*.acme.example", "hooks.example.com:8443", "xn--bcher-kva.example")
POLICY = TargetPolicy(tuple(map(parse_allowed_host, ALLOWED)))

NO_URLS = [
    "",
    "hooks.example.com",
    "//hooks.example.com/",
    "https:",
    "https:/",
    "https://",
    "https:///",
    "https:///hooks.example.com",
    "https:/hooks.example.com",
    "https:hooks.example.com",
    "http://hooks.example.com/",
    "HTTPS://hooks.example.com/",
    "Https://hooks.example.com/",
    "httpss://hooks.example.com/",
    " https://hooks.example.com/",
    "https://hooks.example.com/ ",
    "\thttps://hooks.example.com/",
    "https ://hooks.example.com/",
    "https\t://hooks.example.com/",
    "ht\ntps://hooks.example.com/",
    "file:///etc/passwd",
    "ftp://hooks.example.com/",
    "gopher://hooks.example.com/",
    "dict://hooks.example.com/",
    "ldap://hooks.example.com/",
    "jar:https://hooks.example.com!/",
    "data:text/plain,x",
    "javascript:alert(1)",
    "unix:///var/run/docker.sock",
    "https+unix://hooks.example.com/",
    "view-source:https://hooks.example.com/",
    "url:https://hooks.example.com/",
]
USER_INFO = [
    "https://user@hooks.example.com/",
    "https://user:password@hooks.example.com/",
    "https://@hooks.example.com/",
    "https://:@hooks.example.com/",
    "https://hooks.example.com@127.0.0.1/",
    "https://hooks.example.com:443@127.0.0.1/",
    "https://hooks.example.com%40127.0.0.1/",
    "https://127.0.0.1\\@hooks.example.com/",
    "https://127.0.0.1#@hooks.example.com/",
    "https://127.0.0.1%23@hooks.example.com/",
    "https://127.0.0.1&@hooks.example.com/",
    "https://a@b@hooks.example.com/",
    "https://hooks.example.com\\@127.0.0.1/",
    "https://hooks.example.com;@127.0.0.1/",
]
PORTS = [
    "https://hooks.example.com:/",
    "https://hooks.example.com:0/",
    "https://hooks.example.com:00443/",
    "https://hooks.example.com:0443/",
    "https://hooks.example.com:+443/",
    "https://hooks.example.com:-443/",
    "https://hooks.example.com: 443/",
    "https://hooks.example.com:443 /",
    "https://hooks.example.com:65536/",
    "https://hooks.example.com:99999999999999999999/",
    "https://hooks.example.com:443:443/",
    "https://hooks.example.com:443x/",
    "https://hooks.example.com:0x1bb/",
    "https://hooks.example.com:4_43/",
    "https://hooks.example.com:٤٤٣/",
    "https://hooks.example.com:443@/",
    "https://:443/",
]
ADDRESSES_AS_HOSTS = [
    "https://127.0.0.1/",
    "https://127.1/",
    "https://127.0.1/",
    "https://2130706433/",
    "https://0x7f000001/",
    "https://0x7f.0.0.1/",
    "https://0177.0.0.1/",
    "https://017700000001/",
    "https://0x7f.1/",
    "https://0/",
    "https://0.0.0.0/",
    "https://169.254.169.254/latest/meta-data/",
    "https://0xa9fea9fe/",
    "https://2852039166/",
    "https://0251.0376.0251.0376/",
    "https://10.0.0.1/",
    "https://100.64.0.1/",
    "https://8.8.8.8/",
    "https://1.2.3.4.5/",
    "https://256.256.256.256/",
    "https://[::1]/",
    "https://[::]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:7f00:1]/",
    "https://[64:ff9b::7f00:1]/",
    "https://[fe80::1%25eth0]/",
    "https://[2606:4700::1111]/",
    "https://[v1.x]/",
    "https://[::1/",
    "https://::1/",
    "https://①②⑦.⓪.⓪.①/",
    "https://127。0。0。1/",
    "https://hooks.example.com.127/",
    "https://hooks.example.0x7f/",
]
NAMES = [
    "https://hooks.example.com./",
    "https://hooks.example.com../",
    "https://.hooks.example.com/",
    "https://hooks..example.com/",
    "https://./",
    "https://../",
    "https://-hooks.example.com/",
    "https://hooks-.example.com/",
    "https://hooks_1.example.com/",
    "https://*.acme.example/",
    "https://hooks.example.com%00.evil.example/",
    "https://hooks.example.com%2e/",
    "https://hooks%2eexample%2ecom/",
    "https://hooks.example.com\x00.evil.example/",
    "https://hooks.example.com\r\nHost: evil.example/",
    "https://hooks.example.com\t/",
    "https://hooks.exam\u00adple.com/",
    "https://hooks.examp\u200ble.com/",
    "https://hoo\u212as.example.com/",
    "https://hooks.example\uff0ecom/",
    "https://hooks.ex\u0430mple.com/",
    "https://b\u00fccher.example/",
    "https://hooks.example.com\u2044/",
    "https://hooks.example.com\uff0f@evil.example/",
    "https://hooks.example.com\\/",
    "https://hooks.example.com|/",
    "https://hooks.example.com`/",
    "https://hooks.example.com$IFS/",
    "https://{hooks}.example.com/",
    "https://hooks,example.com/",
    f"https://{'a' * 64}.acme.example/",
    f"https://{'a.' * 127}acme.example/",
]
PATHS = [
    "https://hooks.example.com/#fragment",
    "https://hooks.example.com#",
    "https://hooks.example.com/?a#b",
    "https://hooks.example.com/a b",
    "https://hooks.example.com/a\r\nX-Header: b",
    "https://hooks.example.com/a\nb",
    "https://hooks.example.com/a\x00",
    "https://hooks.example.com/a\x7f",
    "https://hooks.example.com/a\\b",
    'https://hooks.example.com/"',
    "https://hooks.example.com/<x>",
    "https://hooks.example.com/{x}",
    "https://hooks.example.com/[x]",
    "https://hooks.example.com/^",
    "https://hooks.example.com/é",
    "https://hooks.example.com/%",
    "https://hooks.example.com/%2",
    "https://hooks.example.com/%zz",
    "https://hooks.example.com/%%41",
    "https://hooks.example.com/%u0041",
    "https://hooks.example.com/?q=%",
    f"https://hooks.example.com/{'a' * 2048}",
]
OTHER_HOSTS = [
    "https://evil.example/",
    "https://example.com/",
    "https://com/",
    "https://localhost/",
    "https://hooks.example.com.evil.example/",
    "https://evilhooks.example.com/",
    "https://xhooks.example.com/",
    "https://acme.example/",
    "https://evilacme.example/",
    "https://acme.example.evil.example/",
    "https://hooks.example.com:444/",
    "https://hooks.example.com:80/",
    "https://hooks.example.com:22/",
    "https://a.acme.example:8443/",
    "https://xn--hoks-5na.example.com/",
    "https://metadata.google.internal/computeMetadata/v1/",
    "https://kubernetes.default.svc/",
    "https://evil.example/?hooks.example.com",
    "https://evil.example/hooks.example.com",
    "https://evil.example?https://hooks.example.com/",
]
MALFORMED = [*NO_URLS, *USER_INFO, *PORTS, *ADDRESSES_AS_HOSTS, *NAMES, *PATHS]


@pytest.mark.parametrize("url", MALFORMED, ids=ascii)
def test_urls_that_are_not_plain_are_refused(url: str) -> None:
    with pytest.raises(WebhookUrlInvalid) as refused:
        POLICY.check(url)
    assert refused.value.code == "webhook_url_invalid"


@pytest.mark.parametrize("url", OTHER_HOSTS, ids=ascii)
def test_hosts_and_ports_that_the_operator_has_not_listed_are_refused(url: str) -> None:
    with pytest.raises(WebhookHostNotAllowed) as refused:
        POLICY.check(url)
    assert refused.value.code == "webhook_host_not_allowed"


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("https://hooks.example.com", "hooks.example.com", 443, "/"),
        ("https://hooks.example.com/", "hooks.example.com", 443, "/"),
        ("https://HOOKS.Example.Com/In", "hooks.example.com", 443, "/In"),
        ("https://hooks.example.com:443/", "hooks.example.com", 443, "/"),
        ("https://hooks.example.com:8443/a", "hooks.example.com", 8443, "/a"),
        ("https://hooks.example.com?a=b", "hooks.example.com", 443, "/?a=b"),
        ("https://hooks.example.com/a?b=https://x@y", "hooks.example.com", 443, None),
        ("https://hooks.example.com/%41%0a;a=b/../c//d", "hooks.example.com", 443, None),
        ("https://x.acme.example/", "x.acme.example", 443, "/"),
        ("https://y.x.acme.example/", "y.x.acme.example", 443, "/"),
        ("https://xn--bcher-kva.example/", "xn--bcher-kva.example", 443, "/"),
    ],
)
def test_plain_urls_of_listed_hosts_are_accepted(
    url: str, host: str, port: int, path: str | None
) -> None:
    target = POLICY.check(url)
    expected = url.removeprefix("https://hooks.example.com") if path is None else path
    assert (target.host, target.port, target.path) == (host, port, expected)
    assert POLICY.check(target.url) == target


def test_without_hosts_every_url_is_refused() -> None:
    with pytest.raises(WebhookHostNotAllowed, match="sends no webhooks"):
        TargetPolicy().check("https://hooks.example.com/")


@pytest.mark.parametrize(
    "text", ["", "*", "*.", "a.*.example", "10.0.0.1", "a:b", "https://a", "a/"]
)
def test_a_host_is_listed_by_name_only(text: str) -> None:
    with pytest.raises(WebhookUrlInvalid):
        parse_allowed_host(text)


def test_a_listed_host_is_written_as_it_is_read() -> None:
    assert [str(parse_allowed_host(text)) for text in ALLOWED] == list(ALLOWED)
    assert POLICY.ports == {443, 8443}


NOT_PUBLIC = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200"),
    *("100.127.255.255", "127.0.0.1", "127.255.255.254", "169.254.0.1", "169.254.169.254"),
    *("169.254.170.2", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1"),
    *("192.88.99.1", "192.168.0.1", "198.18.0.1", "198.19.255.255", "198.51.100.1"),
    *("203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
    "168.63.129.16",
    *("::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1"),
    *("64:ff9b::127.0.0.1", "64:ff9b::8.8.8.8", "64:ff9b:1::1", "100::1", "2001::1"),
    *("2001:0:7f00:1::", "2001:20::1", "2001:db8::1", "2002:7f00:1::", "2002:a9fe:a9fe::1"),
    *("3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0"),
    *("fec0::1", "ff02::1", "ff0e::1", "4000::1", "8000::1"),
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not POLICY.allows(ip_address(address))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "2a00::1"]
)
def test_public_addresses_are_allowed(address: str) -> None:
    assert POLICY.allows(ip_address(address))


def test_no_address_is_allowed_that_python_takes_for_private() -> None:
    """An independent list; ours refuses more."""
    drawn = random.Random(7)
    for _ in range(20_000):
        for address in (
            IPv4Address(drawn.randrange(2**32)),
            IPv6Address((1 << 125) + drawn.randrange(2**125)),
            IPv6Address((0x2001 << 112) + drawn.randrange(2**112)),
        ):
            is_suspect = not address.is_global or address.is_multicast or address.is_reserved
            assert not (is_suspect and POLICY.allows(address)), address


def test_an_address_in_a_network_of_the_operator_is_allowed() -> None:
    networks = (ip_network("127.0.0.0/8"), ip_network("fd00::/8"))
    policy = TargetPolicy(POLICY.hosts, networks)
    allowed = ["127.0.0.1", "fd00::1"]
    for address in NOT_PUBLIC:
        expected = address in allowed or address.startswith(("127.", "fd00"))
        assert policy.allows(ip_address(address)) == expected


def test_the_parsed_form_of_a_url_is_stable() -> None:
    target = parse_url("https://a.example:8443/x?y")
    assert target.url == "https://a.example:8443/x?y"
