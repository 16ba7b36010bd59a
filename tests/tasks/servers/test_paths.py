import pytest

from tasks.servers.templates import check_path


@pytest.mark.parametrize(
    "path", ["/", "/status/1", "/v1/models/a%2Fb:predict", "/a?id=1&x=..", "/a..b/.c", "/a?u=http://x"]
)
def test_a_plain_path_is_accepted(path):
    check_path(path)


@pytest.mark.parametrize(
    "path",
    [
        *("status", "", "http://evil/x", "//evil/x", "/a//b", "/../x", "/a/..", "/a/../b", "/./a", "/a/..;x/b"),
        *("/%2e%2e/x", "/%2E./x", "/a/..%2fb", "/%252e%252e/x", "/%25252e%25252e/x", "/x%3f/../y"),
        *("/a\\b", "/a%5cb", "/a\r\nX: 1", "/a%0d%0aX", "/a%00", "/a\x7f", "/a?x=%0a", "/a#b", "/" + "a" * 2000),
        "/%" + "25" * 10 + "2e",
    ],
)
def test_a_path_that_could_lead_elsewhere_is_refused(path):
    with pytest.raises(ValueError, match="a path"):
        check_path(path)
