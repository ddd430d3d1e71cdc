"""A mount whose source is away: one who asks for a known name has waited for all."""

from __future__ import annotations

import errno

from stoker.cache.mount.names import KNOWN_S
from stoker.cache.mount.questions import Ask, Effect, Find, Reply
from stoker.cache.mount.requests import ROOT, Opcode
from stoker.cache.mount.source_port import Found
from stoker.cache.mount.state import MountSettings
from stoker.cache.mount.waiting import Failed
from tests.unit.test_mount_core import Asked, Script, asks, refresh, refusal, unpacked_entry

SETTINGS = MountSettings(kernel_ttl_s=1.0, ttl_s=1.0, timeout_s=10.0)
FAILING = [b"y", b"z"]
NAMES = [b"a", b"b", b"c", b"d"]


def found(name: bytes, version: str = "v1") -> Found:
    return Found(False, 100, version + name.decode(), 1.5e9)


def look_up(script: Script, name: bytes) -> list[Effect]:
    return script.ask(Asked(Opcode.LOOKUP, ROOT, name + b"\0"))


def known_and_away() -> tuple[Script, dict[bytes, int]]:
    """All names are known, and who has asked again for two has had no answer."""
    script = Script(SETTINGS)
    nodes = {name: script.look_up(ROOT, name, found(name)) for name in NAMES + FAILING}
    script.now += 2
    for name in FAILING:
        (asked,) = look_up(script, name)
        assert isinstance(asked, Ask)
    script.now += KNOWN_S
    told = script.kept(script.core.tick(script.now))
    assert [node_of(one) for one in told] == [nodes[name] for name in FAILING]
    return script, nodes


def node_of(effect: Effect) -> int:
    assert isinstance(effect, Reply)
    return unpacked_entry(b"".join(effect.parts)[16:]).node


def test_the_next_ones_do_not_wait_and_one_a_second_is_asked() -> None:
    script, nodes = known_and_away()
    tried: list[Effect] = []
    for turn in range(40):
        for name in NAMES:
            told, *more = look_up(script, name)
            assert node_of(told) == nodes[name]
            tried += more
        script.now += 0.125
        assert script.core.tick(script.now) == [], f"nobody waits {turn}"
    assert len(tried) == 1, "what is asked already is not asked again"
    assert asks(tried) == [Find("a")]


def test_who_knows_no_answer_waits_as_long_as_is_said() -> None:
    script, _ = known_and_away()
    (asked,) = look_up(script, b"new")
    assert asks([asked]) == [Find("new")]
    assert script.core.tick(script.now + SETTINGS.timeout_s - 0.1) == []
    assert script.core.tick(script.now + SETTINGS.timeout_s) == refusal(script, errno.ETIMEDOUT)


def test_an_answer_has_all_ask_again() -> None:
    script, nodes = known_and_away()
    told, tried = look_up(script, b"b")
    assert node_of(told) == nodes[b"b"]
    script.now += 0.5
    assert script.answer(tried, found(b"b", "v2")) == []
    (news,) = look_up(script, b"b")
    assert node_of(news) != nodes[b"b"], "it is another file"
    assert asks(look_up(script, b"c")) == [Find("c")]


def test_a_try_that_fails_is_no_answer() -> None:
    script, nodes = known_and_away()
    for turn in range(20):
        name = NAMES[1 + turn % 3]
        told, tried = look_up(script, name)
        assert node_of(told) == nodes[name]
        script.now += 1.0
        assert script.answer(tried, Failed(errno.EIO)) == []
    script.now += 60.0
    assert len(look_up(script, b"a")) == 1, "that was long ago"
    assert script.core.state.waiting


def test_after_a_refresh_all_is_asked_for() -> None:
    script, _ = known_and_away()
    (asked,) = refresh(script, ROOT)
    (tells,) = script.answer(asked, 4)
    script.answer(tells, None)
    for name in NAMES:
        assert asks(look_up(script, name)) == [Find(name.decode())]
