"""Each script's header against its body: a header that has drifted fails here."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from routing.keys import FLEET_KEYS
from routing.scripts import assemble, fragment, names, source

# Every other command counts as writing.
READS = {
    "EXISTS",
    "GET",
    "HEXISTS",
    "HGET",
    "HGETALL",
    "HKEYS",
    "HLEN",
    "HMGET",
    "INFO",
    "SMEMBERS",
    "TIME",
    "ZCARD",
    "ZCOUNT",
    "ZMSCORE",
    "ZRANGE",
    "ZRANGEBYSCORE",
    "ZRANK",
    "ZSCORE",
}
# Words that scripts write into Redis, or compare with what stands there; they are never answers of a script.
_FIELDS = {"epoch", "copy", "record", "catalog", "offers", "excess", "charged", "model", "server", "run_ms"}
_NOT_ANSWERS = _FIELDS | frozenset(
    {
        "open_until",
        "penalty_at",
        "load",
        "failures",
        "slowness",
        "swap",
        "total",
    }  # parts of a score, answered by their place
)

_FUNCTION = r"(?:local function |function \w+\.)(\w+)"  # of a fragment, or of a policy

every_script = pytest.mark.parametrize("name", names())


def header(name: str) -> str:
    found = re.match(r"--\[\[(.*?)\]\]", source(name), re.DOTALL)
    assert found, f"{name}.lua does not begin with a header"
    return found[1]


def body(name: str) -> str:
    """The script's own lines, without header and comments."""
    return re.sub(r"--[^\n]*", "", source(name).split("]]", 1)[1])


def returns(name: str) -> str:
    """What the header says between Returns and the next entry."""
    found = re.search(
        r"Returns (.*?)(?:\n  (?:Clock|Cost|Idempotent|Claiming)|\s{4,}(?:Writes|Cost)|$)", header(name), re.DOTALL
    )
    assert found, f"{name}.lua does not say what it returns"
    return found[1]


def included(name: str) -> list[str]:
    """The fragments that a script includes, in order."""
    return re.findall(r"@include (lib/\w+)", source(name))


def commands(text: str) -> set[str]:
    return set(re.findall(r'redis\.p?call\(\s*"([A-Z]+)"', text))


def called_functions(name: str) -> str:
    """The script with those of its fragments' functions, and of policies' decisions, that it reaches."""
    text = body(name)
    fragments = "".join(re.sub(r"--[^\n]*", "", fragment(f)) for f in included(name))
    functions: dict[str, str] = {}
    for function, lines in re.findall(
        rf"^{_FUNCTION}\([^)]*\)(.*?)(?=^(?:local )?function |\Z)", fragments, re.S | re.M
    ):
        functions[function] = functions.get(function, "") + lines
    reached: set[str] = set()
    while fresh := {f for f in functions if f not in reached and re.search(rf"\b{f}\(", text)}:
        reached |= fresh
        text += "".join(functions[f] for f in fresh)
    return text


def declared_arguments(name: str) -> set[int]:
    """Indexes of ARGV in the header; an open end (`ARGV[3…]`) counts as its first."""
    return {int(number) for number in re.findall(r"ARGV\[(\d+)…?\]", header(name))}


def used_arguments(name: str) -> set[int]:
    """Indexes of ARGV in the body, and where a loop over the rest begins."""
    text = body(name)
    plain = {int(number) for number in re.findall(r"ARGV\[(\d+)\]", text)}
    loops = {int(number) for number in re.findall(r"for \w+ = (\d+), #ARGV", text)}
    return plain | loops


@every_script
def test_a_header_names_the_script_its_keys_its_answers_and_its_cost(name):
    text = header(name)
    assert text.lstrip().startswith(f"{name}: "), "the header begins with the script's name and one sentence"
    for entry in ("KEYS[1", "Returns ", "Cost "):
        assert entry in text, f"{name}.lua: {entry.strip()} is missing"


@every_script
def test_a_header_declares_exactly_the_arguments_that_the_body_uses(name):
    assert declared_arguments(name) == used_arguments(name)


@every_script
def test_every_argument_is_explained(name):
    for number, rest in re.findall(r"ARGV\[(\d+)…?\]([^\n]*)", header(name)):
        assert re.match(r"\s*(\w+|\.)", rest), f"{name}.lua: ARGV[{number}] has no name"


@every_script
def test_every_word_that_a_script_answers_stands_in_its_header(name):
    text = re.sub(r"redis\.call\([^()]*(?:\([^()]*\)[^()]*)*\)", "", body(name))  # words for Redis are no answers
    compared = set(re.findall(r'[=~]= "(\w+)"', text))
    words = set(re.findall(r'"([a-z_]{3,})"', text)) - compared - _NOT_ANSWERS
    declared = set(re.findall(r'"([a-z_]+)"', returns(name)))
    assert words <= declared, f"{name}.lua can answer {words - declared}, which its header does not say"
    assert declared <= words, f"{name}.lua never answers {declared - words}"


@every_script
def test_the_clock_is_mentioned_exactly_where_it_is_read(name):
    reads = re.search(r"\bnow_ms\(", body(name)) is not None
    assert ("@include lib/now_ms" in source(name)) is reads
    assert ("Clock Redis TIME" in header(name)) is reads
    assert "TIME" not in commands(body(name)), "time is read by lib/now_ms alone, so that tests can set it"


@every_script
def test_a_script_that_says_it_writes_nothing_has_no_writing_command(name):
    if "Writes nothing" in header(name).replace("Writes nothing on", ""):
        assert commands(called_functions(name)) <= READS
    else:
        assert commands(called_functions(name)) - READS, f"{name}.lua writes nothing: let its header say so"


@every_script
def test_an_invariant_that_a_header_cites_is_one(name):
    page = Path(__file__).resolve().parents[2] / "ARCHITECTURE.md"
    known = set(re.findall(r"\b[A-Z]+-\d\b", page.read_text("utf-8")))
    assert set(re.findall(r"\b[A-Z]+-\d\b", header(name))) <= known


@every_script
def test_every_fragment_that_is_included_is_used(name):
    for one in included(name):
        functions = re.findall(rf"^{_FUNCTION}", fragment(one), re.MULTILINE)
        later = "".join(fragment(other) for other in included(name) if other != one)
        assert any(f in body(name) + later for f in functions) or one == "lib/fleet", f"{one} is not needed"


def test_no_script_ever_scans_or_reads_a_random_member():
    for name in names():
        forbidden = {"KEYS", "SCAN", "ZSCAN", "HSCAN", "RANDOMKEY", "SRANDMEMBER", "ZRANDMEMBER", "FLUSHALL", "FLUSHDB"}
        assert not commands(assemble(name)) & forbidden


def test_the_fleets_keys_have_the_same_order_in_python_and_in_lua():
    lua = source("lib/fleet")
    pairs = re.findall(r"^local ([A-Z, ]+) = (KEYS\[.*\])$", lua, re.MULTILINE)
    given = [
        (name.strip().lower(), int(number))
        for left, right in pairs
        for name, number in zip(left.split(","), re.findall(r"\[(\d+)\]", right), strict=True)
    ]
    assert [name for name, _ in given] == list(FLEET_KEYS)
    assert [number for _, number in given] == list(range(1, len(FLEET_KEYS) + 1))


def test_a_script_gets_all_of_the_fleets_keys_or_one():
    for name in names():
        wanted = f"KEYS[1..{len(FLEET_KEYS)}]" if "@include lib/fleet" in source(name) else "KEYS[1] "
        assert wanted in header(name), name


@pytest.mark.skipif(shutil.which("luacheck") is None, reason="luacheck is not installed")
@every_script
def test_luacheck_has_nothing_to_say_about_the_script_as_redis_gets_it(name, tmp_path: Path):
    """What a fragment offers need not all be used; what the script itself names must be."""
    path = tmp_path / f"{name}.lua"
    path.write_text(assemble(name))
    offered = "".join(fragment(one) for one in included(name))
    shared = re.findall(r"^local function (\w+)", offered, re.MULTILINE) + [key.upper() for key in FLEET_KEYS]
    command = ["luacheck", "--std", "lua51", "--globals", "KEYS", "ARGV", "--read-globals", "redis", "--no-color"]
    command += ["--no-config", "--max-line-length", "120", str(path), "--ignore", *[f"211/{it}" for it in shared]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
