"""What `-o` says to `stoker mount`, as lines of fstab do."""

from __future__ import annotations

import argparse

import pytest

from stoker.cli.main import build_parser
from stoker.cli.mount_words import take_options
from stoker.errors import ConfigError

OF_ANY_FILE_SYSTEM = (
    "defaults,auto,noauto,nofail,_netdev,user,users,nouser,owner,group,user=ada,exec,noexec,suid,nosuid,dev,nodev,rw,ro,"
    "sync,async,dirsync,atime,noatime,diratime,nodiratime,relatime,norelatime,strictatime,nostrictatime,lazytime,"
    "nolazytime,iversion,noiversion,mand,nomand,silent,loud,nosymfollow,comment=a word,x-systemd.automount,"
    "x-systemd.mount-timeout=30s,X-mount.mkdir=755,uhelper=udisks"
)


def told(*options: str) -> argparse.Namespace:
    """What `stoker mount` is told by them."""
    words = [word for option in options for word in ("-o", option)]
    arguments = build_parser().parse_args(["mount", "s3://b", "/m", *words])
    take_options(arguments)
    return arguments


def test_words_that_any_file_system_has_are_taken() -> None:
    plain, found = vars(told()), vars(told(OF_ANY_FILE_SYSTEM))
    assert {name for name in plain if name not in ("o", "noexec") and plain[name] != found[name]} == set()


@pytest.mark.parametrize(
    ("options", "is_noexec"),
    [
        ("", False), ("noexec", True), ("exec", False), ("noexec,exec", False), ("exec,noexec", True),
        ("user", True), ("users,exec", False), ("exec,owner", True), ("user=ada", True), ("nouser", False),
    ],
)  # fmt: skip
def test_whether_programs_are_run_from_it(options: str, is_noexec: bool) -> None:
    """As mount(8) has it: the last one counts, and what users may mount runs nothing."""
    assert told(options).noexec is is_noexec


def test_options_are_those_of_the_command() -> None:
    found = told("allow_other,no-xattrs,ttl=5s", "cache-dir=/ssd,file_mode=555,no_small_files,,rw")
    assert (found.allow_other, found.no_xattrs, found.small_files) == (True, True, False)
    assert (found.ttl, found.cache_dir, found.file_mode) == ("5s", "/ssd", "555")
    assert told("small_files").small_files is True


@pytest.mark.parametrize("way", ['endpoint="http://a:1,http://b:2"', "endpoint=http://a:1\\,http://b:2"])
def test_a_value_may_have_commas(way: str) -> None:
    found = told(f"rw,{way},ttl=5s")
    assert (found.endpoint, found.ttl) == ("http://a:1,http://b:2", "5s")


def test_to_be_written_to_and_only_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="-o ro,writable"):
        told("rw,writable,ro")
    assert told("ro,rw,writable").writable


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("no_such=1", "-o no_such=1: there is no such option; there are allow_other, "),
        ("allow_other=no", "-o allow_other=no: it takes no value"),
        ("ttl", "-o ttl: there is no such option"),
        ("commentary", "-o commentary: there is no such option"),
        ("remount", "-o remount: a mount stays as it is: unmount it"),
    ],
)
def test_what_is_no_option_is_said(word: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        told(f"rw,{word}")
