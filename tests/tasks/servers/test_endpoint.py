"""The address of a server: the host and port for the connection, and the target of each request."""

import pytest

from tasks.servers.endpoint import parse_endpoint, quote_target


@pytest.mark.parametrize(
    ("url", "origin", "host"),
    [
        ("http://a", ("http", "a", 80), "a"),
        ("HTTP://A.example:80/", ("http", "a.example", 80), "a.example"),
        ("https://a:80/", ("https", "a", 80), "a:80"),
        ("http://[::1]:9/", ("http", "::1", 9), "[::1]:9"),
        ("http://bücher.example/", ("http", "xn--bcher-kva.example", 80), "xn--bcher-kva.example"),
    ],
)
def test_the_host_header_names_a_port_that_is_not_the_default(url, origin, host):
    endpoint = parse_endpoint(url)
    assert endpoint.origin == origin and endpoint.header_lines == (f"Host: {host}",)


@pytest.mark.parametrize(
    ("url", "path", "target"),
    [
        ("http://a", "", "/"),
        ("http://a/", "", "/"),
        ("http://a?key=1", "", "/?key=1"),
        ("http://a/v1/generate/#top", "/v1/generate", "/v1/generate/"),
        ("http://a/v1 beta?x=ä", "/v1 beta", "/v1%20beta?x=%C3%A4"),
        ("http://a/x%20y%2fz?a=b%26c", "/x%20y%2fz", "/x%20y%2fz?a=b%26c"),
    ],
)
def test_jobs_are_submitted_to_the_path_of_the_url(url, path, target):
    endpoint = parse_endpoint(url)
    assert (endpoint.path, endpoint.target, endpoint.url) == (path, target, url.partition("#")[0])


def test_the_user_of_a_url_becomes_an_authorization_header():
    assert parse_endpoint("http://u:p%40@a/").header_lines == ("Host: a", "Authorization: Basic dTpwQA==")


@pytest.mark.parametrize(
    "url",
    ["gpu1:9001", "/generate", "ftp://a/", "http://", "http://a:x/", "http://a:65536/", "http://a/\n", "http://[a/"],
)
def test_a_url_without_http_and_a_host_is_refused(url):
    with pytest.raises(ValueError, match=r"endpoint|URL|[Pp]ort"):
        parse_endpoint(url)


@pytest.mark.parametrize(
    "target", ["/a/b-1_2~3.4", "/a%2Fb?c=d&e=%20", "/v1/models/m:predict", "//a", "/a;b=(c),*!'$@[1]"]
)
def test_a_valid_target_is_sent_unchanged(target):
    assert quote_target(target) == target


@pytest.mark.parametrize(
    ("target", "quoted"),
    [("/a b", "/a%20b"), ("/100%", "/100%25"), ("/%zz", "/%25zz"), ("/ä", "/%C3%A4"), ('/"<>', "/%22%3C%3E")],
)
def test_characters_that_http_does_not_allow_in_a_target_are_quoted(target, quoted):
    assert quote_target(target) == quoted
