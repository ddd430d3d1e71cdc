from collections.abc import Sequence
from mmap import mmap
from typing import Any

import numpy.typing as npt

def crc32c(data: bytes | bytearray | memoryview) -> int:
    """The checksum of blocks: CRC-32C (Castagnoli), of the processor where it has one."""

class FileProblem(OSError):
    """A file of the index cannot be used: its errno (0: it is not what it should be), and a message."""

class Replay:
    """What opening an index met in its file."""

    @property
    def records(self) -> int: ...
    @property
    def damaged_bytes(self) -> int: ...
    @property
    def was_torn(self) -> bool: ...

class Found:
    """An object as it was when it was looked up.

    Times are seconds since 1970; `checked_s` 0: the origin must be asked.
    """

    @property
    def version(self) -> str: ...
    @property
    def attributes(self) -> str:
        """What the origin says of it besides: lines of headers, each with its end."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def checked_s(self) -> int: ...
    @property
    def used_s(self) -> int: ...
    @property
    def container(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def crc(self) -> int: ...
    @property
    def tag(self) -> int:
        """Of its version: two versions of a key that are known one after the other have different ones."""

    @property
    def is_absent(self) -> bool: ...
    @property
    def is_large(self) -> bool: ...
    @property
    def is_verified(self) -> bool: ...
    def block(self, block: int) -> tuple[int, bool] | None:
        """Checksum of a held block, and whether it was verified since the start; None: it is not held."""

class Piece:
    """A place where bytes lie that are held; `block` is None for an object that is packed whole."""

    def __init__(self, bucket: int, id: bytes, block: int | None, container: int) -> None: ...
    @property
    def bucket(self) -> int: ...
    @property
    def id(self) -> bytes: ...
    @property
    def block(self) -> int | None: ...
    @property
    def container(self) -> int: ...
    @property
    def used_s(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def crc(self) -> int: ...
    @property
    def is_verified(self) -> bool: ...

class Container:
    """What is held of one file; `used_s` is when the last of it was held."""

    @property
    def bucket(self) -> int: ...
    @property
    def is_large(self) -> bool: ...
    @property
    def pieces(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def used_s(self) -> int: ...

class Survey:
    """What a look through the folder of the containers' files found beside the index."""

    @property
    def unknown(self) -> list[int]:
        """Files that the index does not know."""

    @property
    def missing(self) -> list[int]:
        """Containers that have no file."""

    @property
    def too_long(self) -> list[int]:
        """Files of large objects that take more of the disk than is held of them."""

    @property
    def segments(self) -> dict[int, tuple[Container, int]]:
        """And what their files take of the disk."""

    @property
    def large_bytes(self) -> dict[int, int]:
        """By bucket, what the blocks of its large objects take, in whole pages."""

class BucketFigures:
    """What is held of one bucket."""

    @property
    def objects(self) -> int: ...
    @property
    def pieces(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...

class Name:
    """An object with its name."""

    @property
    def key(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def id(self) -> bytes: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def checked_s(self) -> int: ...
    @property
    def used_s(self) -> int: ...
    @property
    def container(self) -> int: ...
    @property
    def is_absent(self) -> bool: ...

class Index:
    """Objects and where their bytes are, durable in one file. Safe to use from several threads; see `index.h`.

    Opening and all that appends to the file raises FileProblem.
    """

    def __init__(self, path: str, block_size_bytes: int, now_s: int = ...) -> None:
        """`now_s`: what the file says of later is taken for just now, and is not fresh: the clock was set back."""

    @property
    def replay(self) -> Replay: ...
    @property
    def is_of_later(self) -> bool:
        """Whether the file told of times that are still to come."""

    def file_bytes(self) -> int: ...
    def memory_bytes(self) -> int: ...
    def __len__(self) -> int: ...
    def bucket(self, name: str, note: str) -> int:
        """The number of a bucket, which is made where there is none; `note` is kept with it."""

    def buckets(self) -> dict[str, tuple[int, str]]: ...
    def find(self, bucket: int, key: str, with_blocks: bool = False) -> Found | None: ...
    def held(self, bucket: int, key: str, tag: int, block: int, now_s: int) -> Piece | None:
        """Where a block of that version is; counts as a use. An object that is packed whole is its block 0."""

    def learn(
        self,
        bucket: int,
        key: str,
        version: str,
        size_bytes: int,
        absent: bool,
        now_s: int,
        attributes: str = "",
        stays_true: bool = False,
    ) -> bool:
        """What the origin says; whether that is another version than was known, whose pieces are gone. `stays_true`:
        what was known before, if this cannot be written down."""

    def forget(self, bucket: int, key: str) -> bool: ...
    def forget_absent(self, before_s: int) -> int:
        """Of all keys of which it is known that there is no such object, those that nobody has asked about since then;
        how many that were."""

    def refresh(self, bucket: int, prefix: str) -> int:
        """Have the origin asked before anything under the prefix is served again; how many keys that are."""

    def clear(self, bucket: int) -> None: ...
    def hold(
        self,
        bucket: int,
        key: str,
        version: str,
        block: int | None,
        container: int,
        offset: int,
        crc: int,
        now_s: int,
    ) -> bool:
        """A piece was written and verified. False: the key has another version by now."""

    def verified(self, bucket: int, key: str, block: int | None, container: int) -> bool: ...
    def lose(self, piece: Piece) -> bool: ...
    def move(self, piece: Piece, container: int, offset: int) -> bool:
        """A packed object was written anew. False: it does not lie where the piece says."""

    def lose_container(self, container: int) -> None: ...
    def lose_containers(self, containers: Sequence[int]) -> None: ...
    def use(self, bucket: int, key: str, block: int | None, now_s: int) -> None: ...
    def containers(self) -> dict[int, Container]: ...
    def container(self, number: int) -> Container | None: ...
    def doubt(self, container: int) -> None:
        """Have what is held of it verified before it is served again."""

    def key_of(self, piece: Piece) -> str:
        """The key that a piece belongs to; empty if it is known no more."""

    def ids(self, bucket: int, keys: Sequence[str]) -> bytes:
        """The last eight bytes of each key's id, as pieces have it, one after the other."""

    def lacking(self, bucket: int, keys: Sequence[str], checked_from_s: int) -> list[int]:
        """Which of these keys are not held whole, or of which nobody has asked the origin since then; not of those that
        are known not to be there. Counts as no use."""

    def container_max(self) -> int:
        """The largest number that was ever used, as far as the file tells."""

    def pieces(self, container: int, with_keys: bool = False) -> list[tuple[Piece, str]]:
        """What is held of a container."""

    def container_keys(self) -> dict[int, str]:
        """The key of some object of each container."""

    def figures(self) -> dict[int, BucketFigures]: ...
    def sample(self, count: int, buckets: Sequence[int], is_large: bool | None, seed: int) -> list[Piece]:
        """Some pieces that are held, drawn by chance; no buckets: of any."""

    def sample_ids(self, segments: Sequence[int], count: int, seed: int) -> dict[int, bytes]:
        """Of each of these segments the ids (16 bytes) of so many of its objects, drawn by chance; of all, where it has
        no more; nothing of one that has none."""

    def scan(self, bucket: int, prefix: str, cursor: int, limit: int) -> tuple[list[Name], int]:
        """Objects in no order, and the cursor to go on with; 0 begins, and comes after the last."""

    def survey(self, folder: str) -> Survey:
        """Look through the folder of the files, at the start."""

    def compact(self, anyway: bool = False) -> bool: ...
    def sync(self) -> None: ...

class Files:
    """Open files of containers, below a folder."""

    def __init__(self, folder: str, open_max: int) -> None: ...
    def path(self, container: int) -> str: ...
    def is_used(self, container: int) -> bool:
        """Whether somebody sends from it. Asked after its blocks were taken out of the index: then nobody begins to."""

    def forget(self, container: int, size_bytes: int) -> None:
        """It is unlinked: what is being sent from it goes on, and its bytes are `leaving_bytes` until then."""

    def leaving_bytes(self) -> int: ...

class FrontSettings:
    """Limits of a front; see `front.h` for what each means."""

    connections_max: int
    head_bytes_max: int
    body_bytes_max: int
    head_s: float
    body_s: float
    body_bytes_per_s_min: float
    idle_s: float
    send_s: float
    egress_bytes_per_s: float
    handed_bytes_max: int
    handing_bytes_max: int
    peer_silence_s: float
    domains: list[str]
    """Below which the host of a request names its bucket: what the back answers."""
    open_targets: list[str]
    """Of these routes, exactly, the back hears without a token as well: as of one who is still to be found out (-3)."""
    connection_bytes_per_s: float
    passing_max: int
    threads: int

class Figures:
    """What a front has done since it was made; `connections` are those that are open now."""

    @property
    def accepted(self) -> int: ...
    @property
    def refused(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def handed_over(self) -> int: ...
    @property
    def sent_bytes(self) -> int: ...
    @property
    def timed_out(self) -> int: ...
    @property
    def connections(self) -> int: ...
    @property
    def waiting(self) -> int:
        """What the back has not taken yet."""

class Tally:
    """What a front has answered by itself since it was made."""

    @property
    def hits(self) -> list[tuple[bool, str, int, int]]:
        """Whether they were signed, method, status, and how many those were."""

    @property
    def refused(self) -> dict[int, int]:
        """By status."""

    @property
    def bounds_s(self) -> list[float]:
        """Of `within`."""

    @property
    def within(self) -> list[int]:
        """How many hits began to be answered within each bound and not within the one before; the last: later."""

    @property
    def handed_on_bounds_s(self) -> list[float]:
        """Of `handed_on_within`: those of `Histogram`."""

    @property
    def handed_on_within(self) -> list[int]:
        """The same of answers for which other servers were asked: until they were here. `hits` has them, too."""

    @property
    def handed_on_seconds(self) -> float:
        """As `seconds`, of those."""

    @property
    def seconds(self) -> float:
        """From when a hit was asked for to when it began to be answered, of all together."""

    @property
    def failed_handshakes(self) -> int:
        """Of TLS; those that were left, or took too long, are not among them."""

class InflowBytes:
    """Memory of an inflow, which stays as it is while this lives."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class Inflow:
    """The bytes of a block while they come in: written once, from the start, and sent to many meanwhile."""

    def __init__(self, size_bytes: int) -> None: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def filled(self) -> int: ...
    @property
    def is_kept(self) -> bool:
        """Whether it is in a file, and takes no memory any more."""

    def view(self) -> InflowBytes:
        """What is there by now; nothing once it is kept."""

    def take(self, part: bytes | bytearray | memoryview) -> bool:
        """The next bytes; False, and nothing is taken, if they are more than are missing."""

    def keep(self, files: Files, container: int, offset: int) -> bool:
        """All of it lies in a file by now: who is not done is sent the rest from there. False: it cannot be opened."""

class Writer:
    """Writes blocks and works out their checksums, on a thread of its own. Bytes that are passed to `write` are held on
    to, and stay as they are, until it was taken that they are written. Once it is gone, all is."""

    def __init__(self) -> None: ...
    def write(self, number: int, fd: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of it to a place in a file; the descriptor is closed then. Raises ValueError for a number that is
        being written."""

    def take(self) -> list[tuple[int, int, int]]:
        """What is done by now: its number, its CRC-32C, and the errno, which is 0 if all is written."""

    def fileno(self) -> int:
        """Can be read from whenever there is something to be taken."""

class Mapping:
    """The beginning of a file as memory, for reading; unmapped with the last view of it. It may be longer than the
    file: who looks behind its end is killed (SIGBUS). Raises OSError."""

    def __init__(self, fd: int, size_bytes: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Lent:
    """The first bytes of some memory, until nobody sees them any more: then a byte of `marks` is 0, unless that is in a
    forked copy of this process. No Python runs for that, in which a Ctrl-C would be lost. Raises ValueError."""

    def __init__(
        self, memory: mmap | bytearray, size_bytes: int, marks: mmap | bytearray, mark: int
    ) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class PlainFiles:
    """Numbers of files that can be opened to be read without a decision. Of any thread."""

    def __init__(self) -> None: ...
    def add(self, node: int, /) -> None: ...
    def discard(self, node: int, /) -> None: ...
    def __contains__(self, node: object, /) -> bool: ...

def read_request(device: int, buffer: memoryview, attributes: bytes, plain: PlainFiles) -> int:
    """The next request of a FUSE device that needs a decision: how many bytes of it are in the buffer. Others are
    answered on the way: plain files are opened as number 0, and that is closed; IOCTL is refused (ENOTTY), and so
    (ENODATA) are extended attributes whose names do not begin with `attributes`; where that is empty, those are handed
    on. Raises OSError, as reading does."""

_Asked = tuple[str, bytes, dict[bytes, bytes], bytes, int, bool, int, str, str]
_Body = tuple[bytes, bool]
_Wanted = tuple[int, int, bytes]

class TlsContext:
    """A server's certificate and key, and the certificates of who signs those of clients, as files in PEM.
    `is_client_required`: who shows none ends in the handshake. Raises RuntimeError where they, or OpenSSL's libraries,
    cannot be used."""

    def __init__(
        self, certificate: str, key: str, client_ca: str = "", is_client_required: bool = False
    ) -> None: ...

class Fleet:
    """Who owns what in a fleet: `table` has numbers of `peers` (unsigned, of two bytes), by the XXH64 of a name modulo
    its length, `me` that of this server. `peers`: their addresses, of digits, and ports; an empty one: it is not to be
    asked by the front. `authorization`: what is shown to them. `buckets`: what stands for the origin of each, and
    whether the front is to ask for what is not here. `tells_of_reads`: what other servers ask for under a name is for
    the back, which tells of it in logs. Raises ValueError."""

    def __init__(
        self,
        peers: list[tuple[str, int]],
        table: bytes,
        me: int,
        authorization: str,
        buckets: dict[str, tuple[str, bool]],
        tells_of_reads: bool = False,
    ) -> None: ...
    def owner(self, bucket: str, key: str) -> int:
        """The number of who owns the first block of an object; -1: nobody does."""

class Front:
    """HTTP/1.1 on threads of its own: answers hits, and hands all else to the back.

    The back reads `take` whenever `fileno()` is readable:

    - `("asked", connection, asked, None)`: method, target, headers, body, id of the token (-2 where none is needed, -3
      where the back is to find out), whether it came by a Unix socket, the bytes of a body that comes in parts (-1:
      nobody knows how many), the name in the peer's certificate, which was verified (empty: it has shown none), and
      its address (empty: it came by a Unix socket). Of one of whom the back is to find out who it is the body always
      comes in parts;
    - `("body", connection, None, (bytes, whether they are the last))`, after `more`;
    - `("drained", connection, None, None)`, after `notify`;
    - `("gone", connection, None, None)`, for one that was asked of or waited for: it hears nothing;
    - `("broken", container, None, None)`: its file cannot be read, or is too short.
    """

    def __init__(self, index: Index, files: Files, settings: FrontSettings) -> None: ...
    def listen(self, fd: int) -> None:
        """Take over a listening socket that does not block. Before `start`."""

    def start(self) -> None: ...
    def drain(self) -> None:
        """Take no more connections, end idle ones, and the others when what was asked is answered."""

    def stop(self) -> None: ...
    def set_rules(
        self,
        tokens: list[tuple[int, str, dict[str, list[str]], str, str]],
        buckets: dict[str, tuple[int, float, int]],
        tenants: dict[str, float] = ...,
        is_open: bool = False,
        asks_back: bool = False,
        blobs: dict[str, tuple[int, float, int]] = ...,
        certificates: dict[str, int] | None = None,
    ) -> None:
        """Tokens, each with an id (0 or more), prefixes of the keys that it may read, by bucket (`*`: any), the access
        key that it signs for (empty: it is a bearer token; with an empty secret as well: of those who show none), and
        its tenant; buckets with their number, their ttl in seconds, and when the origin must have been asked at the
        earliest, seconds since 1970; and what each tenant may be sent each second (0: no limit of its own). `is_open`:
        no token is needed. `asks_back`: bearer tokens that are none of these are for the back to find out about.
        `blobs`: as `buckets`, of blobs. `certificates`: the ids of those of the tokens that are certificates, by their
        names; others are for the back, unless it is None."""

    def set_tls(self, tls: TlsContext) -> None:
        """Connections by TCP speak TLS from now on, and only that; those that are there go on as they began."""

    def change_tokens(
        self,
        added: list[tuple[int, str, dict[str, list[str]], str, str]],
        removed: list[int],
        tenants: dict[str, float],
        certificates: dict[str, int] = ...,
    ) -> None:
        """These tokens as well, as `set_rules` has them, and those with these ids no more; all else stays."""

    def set_fleet(self, fleet: Fleet) -> None:
        """What is not here of small objects the front asks their owners for, by kept connections, from now on."""

    def charge(self, connection: int, tenant: str) -> bool:
        """What is said on this connection goes on that tenant's account: the back has found out who asks."""

    def set_blobs_until(self, until_s: float, from_s: int) -> None:
        """Until then, by `BootClock`, the front answers hits of blobs that were asked about since `from_s`, seconds
        since 1970."""

    def set_now(self, now_s: int) -> None:
        """Seconds since 1970, as the index counts them."""

    def fileno(self) -> int: ...
    def take(self, limit: int) -> list[tuple[str, int, _Asked | None, _Body | None]]: ...
    def more(self, connection: int, size_bytes: int) -> bool:
        """So many more bytes of the request's body may come."""

    def say(
        self,
        connection: int,
        bytes: bytes | bytearray | memoryview,
        is_data: bool = False,
        is_last: bool = False,
    ) -> bool:
        """`is_last`: with that the answer is finished."""

    def send_file(
        self, files: Files, connection: int, container: int, offset: int, size: int, before: bytes = b""
    ) -> bool:
        """`before`, and then a part of a file; False, and nothing is sent, if the file cannot be opened."""

    def send_inflow(self, connection: int, inflow: Inflow, offset: int, size: int) -> bool:
        """A part of what is still coming in, as it comes. If it never does, the connection has to be dropped."""

    def answer_batch(
        self,
        connection: int,
        keys: Sequence[str],
        bucket: tuple[int, float, int],
        wanted: _Wanted | None = None,
        ranges: bytes | None = None,
        versions: Sequence[str] = (),
    ) -> tuple[int, int, list[int]] | None:
        """Answer with all these objects, or parts of them, if each is here and fresh: their bytes, how many were named
        by their place, and the containers of large ones among those; the answer is finished. None: nothing was said.

        `wanted`: places may be named of items of so many bytes and more, so many more descriptors be passed, and what
        the reader has of them: this front's `instance` and the numbers of containers (u32, big endian), ascending.
        `ranges`: for each part the number of its key (u32, big endian), and where it begins and ends (u64). `versions`:
        those of the keys; an empty one, or none at all: whatever is there.
        """

    def pass_descriptor(
        self, connection: int, bucket: int, container: int, before: bytes = b"", after: bytes = b""
    ) -> bool:
        """Pass a descriptor of a container of this bucket, for reading, with a frame that says so between `before` and
        `after`; False, and nothing is sent, if it cannot be opened or too many are on their way."""

    @property
    def instance(self) -> bytes:
        """Tells what this front has passed from what others have, under the same numbers."""

    def finish(self, connection: int) -> bool: ...
    def drop(self, connection: int) -> bool: ...
    def notify(self, connection: int, unsent_bytes_max: int) -> bool: ...
    def figures(self) -> Figures: ...
    def tally(self) -> Tally: ...
    def tenant_figures(self) -> dict[str, tuple[int, int, float]]:
        """Hits that were answered here, all bytes that were sent, and for how many seconds connections have waited for
        what they may send, by the tenant's name; empty: of all of whom it is not known who they are."""

    def take_hits(self) -> dict[int, tuple[int, int, int, int]]:
        """Hits and their bytes, and what other servers were asked for and its bytes, since the last call, by the
        bucket's number."""

class Reads:
    """The coming reads of one reader: which items, and at which positions. It never changes."""

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    @property
    def positions(self) -> int:
        """Of how many positions all is known."""

    def with_reads(
        self, items: npt.NDArray[Any], positions: npt.NDArray[Any], start: int, stop: int
    ) -> Reads:
        """These as well, in any order: all from `start`, where the others end, to `stop`."""

    def until(self, stop: int, start: int) -> Reads:
        """Only those before `stop`; those before `start` may be gone, too."""

    def since(self, start: int) -> Reads:
        """Those from there on; some before it may be left where few are."""

def next_reads(
    readers: Sequence[Reads],
    starts: Sequence[int],
    stops: Sequence[int],
    items: npt.NDArray[Any],
    with_again: bool = False,
) -> bytes:
    """The next reads of items (8 bytes each), by each reader from its start to its stop, in the order of readers: the
    numbers of the reader and of the item (u32 each), the position, and where it is read again, if asked for (i64
    each)."""

def next_reads_of(
    readers: Sequence[Reads], starts: Sequence[int], stops: Sequence[int], items: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """The same, of a few items, and always with where they are read again."""
