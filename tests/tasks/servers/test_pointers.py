import pytest

from tasks.servers.pointers import MISSING, parse, resolve

DOCUMENT = {"foo": ["bar", "baz"], "": 0, "a/b": 1, "m~n": 8, "n": None, "~1": 9}


@pytest.mark.parametrize(
    ("pointer", "value"),
    [("", DOCUMENT), ("/foo", ["bar", "baz"]), ("/foo/0", "bar"), ("/", 0), ("/a~1b", 1), ("/m~0n", 8), ("/~01", 9)],
)
def test_a_pointer_is_resolved_as_in_rfc_6901(pointer, value):
    assert resolve(DOCUMENT, parse(pointer)) == value


@pytest.mark.parametrize("pointer", ["/foo/2", "/foo/-", "/foo/00", "/foo/-1", "/foo/١", "/nope", "/n/x", "/foo/0/b"])
def test_a_value_that_does_not_exist_is_missing(pointer):
    assert resolve(DOCUMENT, parse(pointer)) is MISSING


def test_a_null_is_not_missing():
    assert resolve(DOCUMENT, parse("/n")) is None


@pytest.mark.parametrize("pointer", ["foo", "/a~2", "/a~", "#/foo", "/" + "x" * 500])
def test_an_invalid_pointer_is_refused(pointer):
    with pytest.raises(ValueError, match="JSON pointer"):
        parse(pointer)
