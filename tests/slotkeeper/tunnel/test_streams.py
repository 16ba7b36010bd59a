"""The streams of a tunnel: windows, turns, ends and cuts."""

import struct
from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slotkeeper.tunnel.frames import (
    MAX_DATA_BYTES,
    MAX_JSON_BYTES,
    MAX_MESSAGE_BYTES,
    FrameType,
    TunnelError,
    decode_control,
    decode_message,
    encode_frame,
    encode_json_frame,
)
from slotkeeper.tunnel.streams import (
    TO_AGENT_WINDOW,
    TO_GATEWAY_WINDOW,
    BodyEnded,
    DataReceived,
    RequestReceived,
    ResponseReceived,
    Side,
    StreamReset,
    Tunnel,
    WindowOpened,
)

_HEAD = {"method": "POST", "path": "/run", "headers": {}}
_OK = {"status": 200, "headers": {}}


def _pair() -> tuple[Tunnel, Tunnel]:
    return Tunnel(Side.GATEWAY, 10), Tunnel(Side.AGENT, 10)


def _pass_on(sender: Tunnel, receiver: Tunnel) -> list[object]:
    """Return the events of all messages that are to be sent."""
    events = list[object]()
    while (message := sender.next_message()) is not None:
        events += receiver.receive(message)
    return events


@given(
    st.lists(
        st.tuples(
            st.sampled_from([FrameType.DATA, FrameType.END, FrameType.WINDOW]),
            st.integers(1, 2**32 - 1),
            st.binary(min_size=1, max_size=500),
        ),
        max_size=20,
    )
)
def test_a_frame_is_read_as_it_was_written(frames: list[tuple[FrameType, int, bytes]]) -> None:
    message = b"".join(encode_frame(*frame) for frame in frames)

    assert [tuple(frame) for frame in decode_message(message)] == frames


@pytest.mark.parametrize(
    "message",
    [
        b"\0",
        struct.pack("!IBI", 5, 2, 1) + b"four",
        struct.pack("!IBI", 0, 7, 1),
        struct.pack("!IBI", 0, 2, 1),
        struct.pack("!IBI", 0, 3, 0),
        encode_frame(FrameType.CONTROL, 3, b"{}"),
        encode_frame(FrameType.OPEN, 1, b" " * (MAX_JSON_BYTES + 1)),
        encode_frame(FrameType.DATA, 1, b" " * (MAX_DATA_BYTES + 1)),
        b"\0" * (MAX_MESSAGE_BYTES + 1),
        encode_frame(FrameType.OPEN, 1, b"[]"),
        encode_frame(FrameType.OPEN, 1, b"{"),
        encode_frame(FrameType.CONTROL, 0, b'{"type": 1}'),
        encode_json_frame(FrameType.OPEN, 1, {}) + encode_json_frame(FrameType.OPEN, 1, {}),
        encode_json_frame(FrameType.HEAD, 1, {}),
        encode_json_frame(FrameType.OPEN, 1, {}) + encode_json_frame(FrameType.HEAD, 1, {}),
        encode_json_frame(FrameType.OPEN, 1, {}) + encode_frame(FrameType.WINDOW, 1, b"\0\0\0\0"),
        encode_json_frame(FrameType.OPEN, 1, {}) + encode_frame(FrameType.WINDOW, 1, b"\0\0\0\1"),
        encode_json_frame(FrameType.OPEN, 1, {})
        + encode_frame(FrameType.END, 1)
        + encode_frame(FrameType.DATA, 1, b"late"),
    ],
)
def test_a_message_that_breaks_the_protocol_is_refused(message: bytes) -> None:
    with pytest.raises(TunnelError):
        Tunnel(Side.AGENT, 10).receive(message)


def test_an_unknown_frame_type_from_128_on_is_ignored() -> None:
    assert Tunnel(Side.AGENT, 10).receive(struct.pack("!IBI", 3, 128, 9) + b"new") == []


def test_an_agent_opens_no_stream_and_answers_once() -> None:
    gateway, agent = _pair()
    with pytest.raises(TunnelError):
        gateway.receive(encode_json_frame(FrameType.OPEN, 1, {}))
    stream = gateway.open(_HEAD)
    _pass_on(gateway, agent)
    head = encode_json_frame(FrameType.HEAD, stream, _OK)
    with pytest.raises(TunnelError):
        gateway.receive(encode_frame(FrameType.DATA, stream, b"before its head"))
    assert gateway.receive(head) == [ResponseReceived(stream, _OK)]
    with pytest.raises(TunnelError):
        gateway.receive(head)


def test_an_agent_accepts_no_more_streams_than_agreed() -> None:
    gateway, agent = Tunnel(Side.GATEWAY, 3), Tunnel(Side.AGENT, 2)
    for _ in range(3):
        assert gateway.has_room
        gateway.open(_HEAD)
    assert not gateway.has_room
    with pytest.raises(TunnelError):
        _pass_on(gateway, agent)


def test_a_small_request_and_its_response_leave_in_one_message_each() -> None:
    gateway, agent = _pair()
    stream = gateway.open(_HEAD)
    gateway.send(stream, b"{}")
    gateway.end(stream)
    request = gateway.next_message()
    assert request is not None and gateway.next_message() is None
    assert agent.receive(request) == [
        RequestReceived(stream, _HEAD),
        DataReceived(stream, b"{}"),
        BodyEnded(stream),
    ]
    agent.respond(stream, _OK)
    agent.send(stream, b"yes")
    agent.end(stream)
    response = agent.next_message()
    assert response is not None and agent.next_message() is None
    assert gateway.receive(response) == [
        ResponseReceived(stream, _OK),
        DataReceived(stream, b"yes"),
        BodyEnded(stream),
    ]
    assert gateway.stream_count == agent.stream_count == 0


def test_no_side_sends_more_than_its_window() -> None:
    gateway, agent = _pair()
    stream = gateway.open(_HEAD)
    assert gateway.send(stream, bytes(TO_AGENT_WINDOW + 9)) == TO_AGENT_WINDOW
    assert gateway.send(stream, b"more") == 0
    _pass_on(gateway, agent)
    agent.consumed(stream, TO_AGENT_WINDOW // 2)
    assert _pass_on(agent, gateway) == [WindowOpened(stream)]
    assert gateway.send(stream, bytes(TO_AGENT_WINDOW)) == TO_AGENT_WINDOW // 2
    agent.respond(stream, _OK)
    assert agent.send(stream, bytes(TO_GATEWAY_WINDOW + 9)) == TO_GATEWAY_WINDOW


def test_more_data_than_the_window_ends_the_connection() -> None:
    gateway, agent = _pair()
    stream = gateway.open(_HEAD)
    _pass_on(gateway, agent)
    piece = encode_frame(FrameType.DATA, stream, bytes(MAX_DATA_BYTES))
    for _ in range(TO_AGENT_WINDOW // MAX_DATA_BYTES):
        agent.receive(piece)
    with pytest.raises(TunnelError):
        agent.receive(piece)


def test_a_large_body_does_not_delay_health() -> None:
    gateway, agent = _pair()
    large, health = gateway.open(_HEAD), gateway.open({"method": "GET", "path": "/health", "headers": {}})
    _pass_on(gateway, agent)
    agent.respond(large, _OK)
    agent.send(large, bytes(TO_GATEWAY_WINDOW))
    before = agent.next_message()
    agent.respond(health, _OK)
    agent.send(health, b"{}")
    agent.end(health)

    first, second = agent.next_message(), agent.next_message()

    assert before is not None and first is not None and second is not None
    events = [event for message in (before, first, second) for event in gateway.receive(message)]
    assert BodyEnded(health) in events


def test_an_unsent_stream_is_reported_as_unsent_and_its_frames_are_dropped() -> None:
    gateway, agent = _pair()
    sent = gateway.open(_HEAD)
    message = gateway.next_message()
    unsent, dropped = gateway.open(_HEAD), gateway.open(_HEAD)
    gateway.end(dropped)
    gateway.reset(dropped, "abandoned")

    assert message is not None and agent.receive(message) == [RequestReceived(sent, _HEAD)]
    assert gateway.lose() == [StreamReset(sent, "cut", was_sent=True), StreamReset(unsent, "cut", was_sent=False)]
    assert gateway.next_message() is None


def test_a_reset_ends_a_stream_for_both_sides_and_late_frames_are_ignored() -> None:
    gateway, agent = _pair()
    stream = gateway.open(_HEAD)
    _pass_on(gateway, agent)
    gateway.reset(stream, "abandoned")
    agent.respond(stream, _OK)
    agent.send(stream, b"late")

    assert _pass_on(agent, gateway) == []
    assert _pass_on(gateway, agent) == [StreamReset(stream, "abandoned")]
    assert agent.send(stream, b"later") == 5  # as if it was sent
    assert agent.next_message() is None
    assert gateway.stream_count == agent.stream_count == 0


def test_an_early_response_ends_the_request() -> None:
    gateway, agent = _pair()
    stream = gateway.open(_HEAD)
    gateway.send(stream, b"begin")
    _pass_on(gateway, agent)
    agent.respond(stream, {"status": 409, "headers": {}})
    agent.end(stream)

    assert BodyEnded(stream) in _pass_on(agent, gateway)
    assert _pass_on(gateway, agent) == [StreamReset(stream, "abandoned")]
    assert gateway.stream_count == agent.stream_count == 0


class _Wire(RuleBasedStateMachine):
    """Two sides and a wire that delays: whatever the order, each stream's body arrives whole or the stream is reset."""

    def __init__(self) -> None:
        super().__init__()
        self.gateway, self.agent = Tunnel(Side.GATEWAY, 4), Tunnel(Side.AGENT, 4)
        self.wires: dict[Side, deque[bytes]] = {side: deque() for side in Side}
        self.sent: dict[tuple[Side, int], bytearray] = defaultdict(bytearray)
        self.received: dict[tuple[Side, int], bytearray] = defaultdict(bytearray)
        self.ended: set[tuple[Side, int]] = set()
        self.is_over: set[int] = set()
        self.opened: set[int] = set()
        self.requests: set[int] = set()  # that the agent has received
        self.unread: dict[tuple[Side, int], int] = defaultdict(int)

    @precondition(lambda self: self.gateway.has_room)
    @rule()
    def open(self) -> None:
        self.opened.add(self.gateway.open(_HEAD))

    @rule(stream=st.integers(1, 6), size=st.integers(1, 300_000))
    def send_request(self, stream: int, size: int) -> None:
        if stream in self.opened and self._is_open(Side.GATEWAY, stream):
            self._send(self.gateway, Side.GATEWAY, stream, size)

    @rule(stream=st.integers(1, 6), size=st.integers(1, 1_500_000))
    def send_response(self, stream: int, size: int) -> None:
        if stream in self.requests and self._is_open(Side.AGENT, stream):
            self.agent.respond(stream, _OK)
            self._send(self.agent, Side.AGENT, stream, size)

    @rule(stream=st.integers(1, 6), side=st.sampled_from(list(Side)))
    def end(self, stream: int, side: Side) -> None:
        if self._is_open(side, stream) and stream in (self.opened if side is Side.GATEWAY else self.requests):
            if side is Side.AGENT:
                self.agent.respond(stream, _OK)
            self._of(side).end(stream)
            self.ended.add((side, stream))

    @rule(stream=st.integers(1, 6), side=st.sampled_from(list(Side)))
    def reset(self, stream: int, side: Side) -> None:
        if self._is_open(side, stream) and stream in (self.opened if side is Side.GATEWAY else self.requests):
            self._of(side).reset(stream, "abandoned")
            self.is_over.add(stream)

    @rule(side=st.sampled_from(list(Side)))
    def take(self, side: Side) -> None:
        if (message := self._of(side).next_message()) is not None:
            assert len(message) <= MAX_MESSAGE_BYTES
            self.wires[side].append(message)

    @rule(side=st.sampled_from(list(Side)))
    def arrive(self, side: Side) -> None:
        if not self.wires[side]:
            return
        receiver = Side.AGENT if side is Side.GATEWAY else Side.GATEWAY
        for event in self._of(receiver).receive(self.wires[side].popleft()):
            match event:
                case RequestReceived(stream, _):
                    self.requests.add(stream)
                case DataReceived(stream, data):
                    self.received[side, stream] += data
                    self.unread[receiver, stream] += len(data)
                case BodyEnded(stream):
                    assert stream in self.is_over or self.received[side, stream] == self.sent[side, stream]
                    assert (side, stream) in self.ended
                    if side is Side.AGENT:
                        self.is_over.add(stream)
                case StreamReset(stream, _, _):
                    self.is_over.add(stream)
                case _:
                    pass

    @rule(stream=st.integers(1, 6), side=st.sampled_from(list(Side)))
    def read(self, stream: int, side: Side) -> None:
        self._of(side).consumed(stream, self.unread.pop((side, stream), 0))

    @invariant()
    def windows_hold(self) -> None:
        for (side, stream), sent in self.sent.items():
            receiver = Side.AGENT if side is Side.GATEWAY else Side.GATEWAY
            window = TO_AGENT_WINDOW if side is Side.GATEWAY else TO_GATEWAY_WINDOW
            read = len(self.received[side, stream]) - self.unread[receiver, stream]
            assert len(sent) - read <= window

    def _of(self, side: Side) -> Tunnel:
        return self.gateway if side is Side.GATEWAY else self.agent

    def _is_open(self, side: Side, stream: int) -> bool:
        return (side, stream) not in self.ended and stream not in self.is_over

    def _send(self, tunnel: Tunnel, side: Side, stream: int, size: int) -> None:
        data = bytes([stream]) * size
        self.sent[side, stream] += data[: tunnel.send(stream, data)]


_Wire.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
test_both_ends_agree_after_any_order_of_frames_and_delays = _Wire.TestCase


def test_a_text_message_is_refused():
    with pytest.raises(TunnelError, match="text"):
        Tunnel(Side.AGENT, 1).receive("OPEN a stream")


@pytest.mark.parametrize(
    "message",
    [
        "text",
        b"",
        encode_frame(FrameType.END, 1),
        2 * encode_json_frame(FrameType.CONTROL, 0, {"type": "hello"}),
    ],
)
def test_a_handshake_must_begin_with_exactly_one_control_message(message):
    with pytest.raises(TunnelError):
        decode_control(message)
