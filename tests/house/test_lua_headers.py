"""The header of each script agrees with its body and with its Python declaration."""

import ast
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import hiredis
import pytest
from redis import Redis

from routing.admission.submit_limits import LimitScripts
from routing.progress import ProgressScripts
from routing.queries.process_list import ProcessScripts
from routing.queries.server_status import ServerScripts
from routing.queue.fleets import FleetScripts
from routing.queue.leases import LeaseScripts
from routing.queue.presence import PresenceScripts
from routing.queue.queues import QueueScripts
from routing.queue.slots import SlotScripts
from routing.queue.worker_capacity import WorkerScripts
from routing.scripts import LIBRARY, make_scripts
from slotkeeper.redis.keys import FLEET_KEYS, Keys
from slotkeeper.redis.scripts import Command
from slotkeeper.redis.signatures import BoundScript, join_commands, make_caller, parse_signature, render_locals
from tasks.relay.sinks.redis_stream import StreamScripts
from tests.house.lua_text import body, called_functions, callers, header, included
from tests.house.rule import for_each

# Every other command counts as writing.
READS = {
    "EXISTS",
    "XINFO",
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
_FIELDS = {"epoch", "copy", "record", "catalog", "offers", "excess", "charged", "model", "server", "run_ms", "said"} | {
    "stopping"
}
_NOT_ANSWERS = _FIELDS | frozenset(
    {
        "open_until",
        "penalty_at",
        "away_since",
        "many_kinds",
        "silent_since",
        "load",
        "failures",
        "slowness",
        "swap",
        "silence",
        "total",
    }  # parts of a score, answered by their place
)

every_script = for_each(LIBRARY.script_names())


def words_of(name: str) -> set[str]:
    """Return the words that a script may return, according to its header."""
    return {
        node.value
        for answer in LIBRARY.read_signature(name).returns.values()
        for node in ast.walk(answer)
        if isinstance(node, ast.Constant) and node.value
    }


def commands(text: str) -> set[str]:
    return set(re.findall(r'redis\.p?call\(\s*"([A-Z]+)"', text))


@every_script
def test_a_header_names_the_script_its_keys_its_answers_and_its_cost(name):
    text = header(name)
    assert text.lstrip().startswith(f"{name}: "), "the header begins with the script's name and one sentence"
    for entry in (
        "  Keys: " if LIBRARY.is_on_fleet(name) else "  Key: ",
        "  Returns\n",
        "Cost O(",
    ):
        assert entry in text, f"{name}.lua: {entry.strip()} is missing"


@every_script
def test_a_script_body_uses_each_argument_by_name_and_none_by_index(name):
    assert "ARGV" not in body(name)
    assert max(map(len, LIBRARY.assemble(name).splitlines())) <= 120
    functions = set(re.findall(r"^local function (\w+)", LIBRARY.assemble(name), re.MULTILINE))
    for argument, shape in LIBRARY.read_signature(name).takes.items():
        assert argument not in functions, f"{name}.lua: {argument} would hide a function"
        rows = shape.elts[0] if isinstance(shape, ast.List) else shape
        parts = [ast.unparse(part) for part in rows.keys] if isinstance(rows, ast.Dict) else []
        for used in (rf"\b{argument}\b", *(rf"\.{part}\b" for part in parts if part != "text")):
            assert re.search(used, called_functions(name)), f"{name}.lua never uses {used}"


@every_script
def test_a_header_names_the_keys_that_its_script_touches(name):
    if LIBRARY.is_on_fleet(name):
        text = called_functions(name)
        touched = ", ".join(key for key in FLEET_KEYS if re.search(rf"\b{key.upper()}\b", text))
        assert f"\n  Keys: {touched}\n" in header(name), f"{name}.lua touches {touched}"
    else:
        assert "KEYS[1]" in body(name)


@every_script
def test_a_header_names_the_functions_that_call_its_script(name):
    assert callers()[name], "no function calls it"
    entry = re.search(r"\n  Called by (.*?)\n  \S", header(name), re.DOTALL)
    named = re.sub(r"\s+", " ", entry[1]) if entry else "nothing"
    assert named == ", ".join(callers()[name]), f"{name}.lua is called by {', '.join(callers()[name])}"


# -- what Python calls them with -------------------------------------------------------------------------------

DECLARED = (
    *(
        LeaseScripts,
        PresenceScripts,
        ProcessScripts,
        LimitScripts,
        QueueScripts,
        FleetScripts,
        ServerScripts,
        SlotScripts,
    ),
    WorkerScripts,
    *(ProgressScripts, StreamScripts),
)


def test_every_script_is_declared_once_and_its_header_agrees():
    scripts = make_scripts(Redis(), Keys("test"))
    found = [name for declared in DECLARED for name in vars(scripts.bind(declared))]
    assert sorted(found) == list(LIBRARY.script_names())


class Lease(NamedTuple):
    job_id: str
    lease: str
    seen: int


class Answer(NamedTuple):
    fleet: str
    word: Literal["yes", "no"]
    leases: list[Lease]
    mean: int | None
    by_model: dict[str, float]


HEADER = """--[[ act: does something.
  Takes
    held: {lease: text, job_id: text}      explained, by: a sentence
      which goes on: here
    back: flag, rate: number
    leases: [{job_id: text, seen: int}]
    names: [text]
    rules: {text: text}
  Returns
    word: "yes" | "no"
    leases: [{job_id: text, lease: text,
              seen: int}]
    mean: int | None, by_model: {text: number}
  Cost O(1) ]]
"""


class Acts(Protocol):
    def act(
        self,
        fleet: str,
        *,
        held: Lease,
        back: bool,
        rate: float,
        leases: Sequence[Lease],
        names: Sequence[str],
        rules: dict[str, str],
    ) -> Command[Answer]: ...


def called(method: Any, header: str = HEADER) -> Any:
    """What a call comes to: the words that are sent, and how an answer is read."""
    made = make_caller("act", parse_signature(header), method)
    return made.pack(lambda fleet: fleet), made.read("zimg")


def test_arguments_are_sent_in_the_order_of_the_header():
    pack, _ = called(Acts.act)
    held = Lease("j1", "l1", 7)
    sent = pack("zimg", held=held, back=True, rate=0.5, leases=[held, held], names=["a"], rules={"r": "t"})
    assert sent.args == ("l1", "j1", 1, 0.5, 2, "j1", 7, "j1", 7, 1, "a", "r", "t")


JOINING = """--[[ act: does something.
  Takes
    rate: number, back: flag
    held: [{lease: {name: text, owner: text}, seen: int}]
  Returns
    answers: [{word: text, leases: [text]}]
  Joins held
  Cost O(n) ]]
"""


class Part(NamedTuple):
    lease: "Named"
    seen: int


class Named(NamedTuple):
    name: str
    owner: str


class Word(NamedTuple):
    word: str
    leases: list[str]


class Joining(Protocol):
    def act(self, fleet: str, *, rate: float, back: bool, held: Sequence[Part]) -> Command[list[Word]]: ...


def test_calls_that_are_joined_are_sent_as_one_with_the_rows_of_all():
    found = make_caller("act", parse_signature(JOINING), Joining.act)
    target = BoundScript("act", [], (), b"", found.read("zimg"), found.rows)
    call = found.pack(lambda fleet: target)
    one = call("zimg", rate=0.5, back=False, held=[Part(Named("l1", "w1"), 1)])
    two = call("zimg", rate=0.5, back=False, held=[Part(Named("l2", "w2"), 2), Part(Named("l3", "w3"), 3)])
    assert [one.entry_count, two.entry_count] == [1, 2] and one.join_key == two.join_key
    assert join_commands([one, two]).args == (0.5, 0, "l1", "w1", 1, "l2", "w2", 2, "l3", "w3", 3)
    assert call("zimg", rate=0.6, back=False, held=[]).join_key != one.join_key
    assert target.read([[b"a", [b"b"]], [b"c", []]]) == [Word("a", ["b"]), Word("c", [])]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Joins held", "Joins other"),  # it takes none of that name
        ("Joins held", "Joins rate"),  # not a list
        ("rate: number", "names: [text]"),  # of two lists each is sent with its length
        ("answers: [{word: text, leases: [text]}]", "word: text"),  # of whose row would it be?
    ],
)
def test_only_calls_with_one_list_and_one_answer_per_row_can_be_joined(old, new):
    assert JOINING.count(old) == 1
    with pytest.raises(SyntaxError):
        parse_signature(JOINING.replace(old, new))


def test_a_command_is_packed_in_the_redis_protocol():
    scripts = make_scripts(Redis(), Keys("test"))
    waiting = scripts.bind(QueueScripts)
    for command in (
        waiting.model_status("zimg", account="a|zimg", max_free=1),
        scripts.bind(LimitScripts).count_constraints(
            "zimg", account="a|zimg", models=["zimg"], classes=["c|zimg", "d|zimg"]
        ),
    ):
        assert command.packed == hiredis.pack_command(command.words)


def test_the_response_of_a_script_is_parsed_by_name_and_type():
    _, read = called(Acts.act)
    answer = [b"yes", [[b"j1", b"l1", 7]], None, [[b"zimg", b"0.5"]]]
    assert read(answer) == Answer("zimg", "yes", [Lease("j1", "l1", 7)], None, {"zimg": 0.5})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("back: flag, rate: number", "rate: number, back: flag"),  # another order
        ("back: flag", "return: flag"),  # a wrong name
        ("    names: [text]\n", ""),  # one is missing
        ("back: flag", "back: bool"),  # an unknown type
        ("names: [text]", "names: [int]"),
        ("job_id: text, seen: int}]\n    names", "job_id: text, sent: int}]\n    names"),  # of a row
        ('"yes" | "no"', '"yes" | "maybe"'),
        ("mean: int | None", "mean: int"),
        ("lease: text,\n", "lease: text, "),
        ("              seen: int}]\n", "              seen: text}]\n"),
        ("by_model: {text: number}", "by_model: {text: int}"),
    ],
)
def test_a_header_that_differs_from_the_python_declaration_is_refused_before_a_call(old, new):
    assert HEADER.count(old) == 1
    with pytest.raises((TypeError, SyntaxError)):
        called(Acts.act, HEADER.replace(old, new))


@pytest.mark.skipif(shutil.which("luac") is None, reason="luac is not installed")
def test_the_locals_of_a_header_are_lua():
    subprocess.run(["luac", "-p", "-"], input=render_locals(parse_signature(HEADER)), text=True, check=True)


@every_script
def test_a_header_lists_exactly_the_words_that_its_script_returns(name):
    text = re.sub(r"redis\.call\([^()]*(?:\([^()]*\)[^()]*)*\)", "", body(name))  # words for Redis are no answers
    compared = set(re.findall(r'[=~]= "(\w+)"', text))
    words = set(re.findall(r'"([a-z_]{3,})"', text)) - compared - _NOT_ANSWERS
    declared = words_of(name)
    assert words <= declared, f"{name}.lua can answer {words - declared}, which its header does not say"
    reached = set(re.findall(r'"([a-z_]{3,})"', called_functions(name)))
    assert declared <= reached, f"{name}.lua never answers {declared - reached}"


@every_script
def test_the_clock_is_mentioned_exactly_where_it_is_read(name):
    reads = re.search(r"\bnow_ms\(", body(name)) is not None
    assert ("lib/now_ms" in included(name)) is reads
    assert ("Clock Redis TIME" in header(name)) is reads
    assert "TIME" not in commands(body(name)), "time is read by lib/now_ms alone, so that tests can set it"


@every_script
def test_a_header_says_writes_nothing_exactly_if_the_script_has_no_write_command(name):
    if "Writes nothing" in header(name).replace("Writes nothing on", ""):
        assert commands(called_functions(name)) <= READS
    else:
        assert commands(called_functions(name)) - READS, f"{name}.lua writes nothing: let its header say so"


@every_script
def test_an_invariant_that_a_header_cites_is_one(name):
    page = Path(__file__).resolve().parents[2] / "docs/explanation/invariants.md"
    known = set(re.findall(r"\b[A-Z]+-\d\b", page.read_text("utf-8")))
    assert set(re.findall(r"\b[A-Z]+-\d\b", header(name))) <= known


@every_script
def test_every_fragment_that_is_included_is_used(name):
    """By the file that includes it itself."""
    for file in (name, *(one for one in included(name) if one != "lib/policies")):
        source = LIBRARY.read_source(file)
        words = set(re.findall(r"\w+", re.sub(r"--[^\n]*", "", source)))
        for one in re.findall(r"@include (lib/\w+)", source):
            # The policies are reached through the functions of lib/policy.
            offered = LIBRARY.read_fragment("lib/policy" if one == "lib/policies" else one)
            lines = re.findall(r"^local (?:function )?([\w, ]+)", offered, re.MULTILINE)
            assert words & {found for line in lines for found in line.strip().split(", ")}, (
                f"{file} does not need {one}"
            )


@every_script
def test_a_function_stays_below_luas_limit_of_200_local_variables(name):
    """With some to spare, for policies to come.  The names outside of functions count, those of a block in it."""
    text = "".join(re.sub(r"--[^\n]*", "", LIBRARY.read_fragment(one)) for one in included(name))
    counts, most, function = [0], 0, None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if function is not None:
            function = None if re.match(rf" {{{function}}}end\b", line) else function
            continue
        if re.match(r" *do\b", line):
            counts.append(0)
        elif re.match(r" *end$", line):
            counts.pop()
        elif found := re.match(r" *local (?:function )?(\w+(?:, \w+)*)", line):
            counts[-1] += len(found[1].split(", "))
            most = max(most, sum(counts))
        if re.search(r"\bfunction\b", line) and not re.search(r"\bend\)?$", line):
            function = indent
    assert most <= 185, f"{name} has {most}"


def test_no_script_ever_scans_or_reads_a_random_member():
    for name in LIBRARY.script_names():
        forbidden = {"KEYS", "SCAN", "ZSCAN", "HSCAN", "RANDOMKEY", "SRANDMEMBER", "ZRANDMEMBER", "FLUSHALL", "FLUSHDB"}
        assert not commands(LIBRARY.assemble(name)) & forbidden


def test_the_fleets_keys_have_the_same_order_in_python_and_in_lua():
    lua = LIBRARY.read_source("lib/keys")
    pairs = re.findall(r"^local ([A-Z, ]+) = (KEYS\[.*\])$", lua, re.MULTILINE)
    given = [
        (name.strip().lower(), int(number))
        for left, right in pairs
        for name, number in zip(left.split(","), re.findall(r"\[(\d+)\]", right), strict=True)
    ]
    assert [name for name, _ in given] == list(FLEET_KEYS)
    assert [number for _, number in given] == list(range(1, len(FLEET_KEYS) + 1))


@pytest.mark.skipif(shutil.which("luacheck") is None, reason="luacheck is not installed")
def test_luacheck_finds_nothing_in_the_scripts_as_redis_gets_them(tmp_path: Path):
    """What a fragment offers need not all be used; what the script itself names must be."""
    for_each(LIBRARY.script_names())(partial(_luacheck, tmp_path))()


def _luacheck(folder: Path, name: str) -> None:
    path = folder / f"{name}.lua"
    path.write_text(LIBRARY.assemble(name))
    offered = "".join(LIBRARY.read_fragment(one) for one in included(name))
    shared = re.findall(r"^local (?:function )?(\w+)(?: = memoize)?\(", offered, re.MULTILINE)
    shared += [key.upper() for key in FLEET_KEYS]
    command = ["luacheck", "--std", "lua51", "--globals", "KEYS", "ARGV", "--read-globals", "redis", "--no-color"]
    command += ["--no-config", "--max-line-length", "120", str(path), "--ignore", *[f"211/{name}" for name in shared]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
