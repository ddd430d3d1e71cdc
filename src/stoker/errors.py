"""The error tree: every error that Stoker raises on purpose.

    StokerError
    ├── ConfigError                 a flag, setting, URL or file says something that cannot be
    ├── EnvironmentProblem          the machine refuses: port in use, disk full, missing program
    │   ├── JournalUnavailable      the journal cannot be written or read now
    │   ├── LoaderWorkerLost        a process of a loader was killed or has ended
    │   ├── JournalHeld             another live master has this journal
    │   ├── JournalDamaged          what is kept there is not a journal that this version can read
    │   └── CheckpointDamaged       what lies there is not the checkpoint that was written
    ├── WireError                   a message that breaks the protocol or comes from another version
    ├── AccessDenied                no token, a wrong one, or one that may not do this
    │   └── NotAuthenticated        it is not known who asks
    ├── JobError
    │   ├── WorldTooSmall           fewer nodes or workers than the minimum for the whole timeout
    │   ├── JobTimeout              something took longer than the one user-facing timeout
    │   ├── WorkerFailed            the user's script failed; carries its traceback
    │   ├── MasterUnreachable       no master answers at the endpoint
    │   └── LeadershipLost          somebody else is, or may be, the job's master
    ├── CacheError
    │   ├── ObjectNotFound          the origin has no such object
    │   ├── ObjectChanged           the object's version changed under a reader
    │   │   └── PreconditionFailed  what is there is not what a write was to replace
    │   ├── CorruptBlock            cached bytes do not match their checksum
    │   ├── CacheUnavailable        no cache server answers
    │   ├── AnotherOrigin           servers of a fleet have a bucket of one name from two origins
    │   ├── WriteRefused            the origin answers, and does not take what is written
    │   │   ├── OriginReadOnly      it cannot be written to, or not in this way
    │   │   ├── WriteDenied         it does not let us write
    │   │   ├── OriginFull          it has no room, or the quota is used up
    │   │   ├── BadKey              it can have no object of that name
    │   │   ├── ObjectTooLarge      it takes no object of that size
    │   │   ├── WrongChecksum       what came is not what its sender says of it
    │   │   ├── WrongBodyLength     what was to be written is not as long as was announced
    │   │   ├── NoSuchUpload        an upload in parts that was never begun, or has ended
    │   │   └── BadParts            parts that are not there, not in order, or too small
    │   └── OriginError             the origin failed
    │       └── ShortBody           the origin sent another number of bytes than it announced
    └── DataError
        ├── EmptyDataset            no records under the URL
        ├── BadRecord               a record is damaged, or `decode` rejected it
        └── DatasetChanged          the set of records is not the one the run started with

Each class has an `exit_code`: what the command line exits with when the error ends it.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_WORLD = 3
EXIT_DATA = 4
EXIT_ENVIRONMENT = 5
EXIT_INTERRUPTED = 130


class StokerError(Exception):
    """Base of all errors that Stoker raises on purpose."""

    exit_code = EXIT_FAILED


class ConfigError(StokerError):
    """A flag, setting, URL or file says something that cannot be."""

    exit_code = EXIT_USAGE


class EnvironmentProblem(StokerError):
    """The machine refuses: a port in use, a full disk, a missing program."""

    exit_code = EXIT_ENVIRONMENT


class LoaderWorkerLost(EnvironmentProblem):
    """A process of a loader was killed or has ended. The loader's next loop starts others."""


class JournalUnavailable(EnvironmentProblem):
    """The journal cannot be written or read now; the same call may be tried again."""


class JournalHeld(EnvironmentProblem):
    """Another live master has this journal. `pid` is its process on this host, 0 when that is not known."""

    def __init__(self, message: str, pid: int = 0) -> None:
        super().__init__(message)
        self.pid = pid


class JournalDamaged(EnvironmentProblem):
    """What is kept there is not a journal that this version can read: damaged, foreign, or of a newer Stoker."""


class CheckpointDamaged(EnvironmentProblem):
    """What lies there is not the checkpoint that was written: torn, changed, or of another format."""


class WireError(StokerError):
    """A message that breaks the protocol or comes from another version of it."""


class AccessDenied(StokerError):
    """No token, a wrong one, or one that may not do this."""


class NotAuthenticated(AccessDenied):
    """It is not known who asks: no token, or a wrong one."""


class JobError(StokerError):
    """A training run could not go on."""


class WorldTooSmall(JobError):
    """Fewer nodes or workers than the minimum for the whole timeout."""

    exit_code = EXIT_NO_WORLD


class JobTimeout(JobError):
    """Something took longer than the one user-facing timeout."""

    exit_code = EXIT_NO_WORLD


class WorkerFailed(JobError):
    """The user's script failed. The message ends with its traceback."""


class MasterUnreachable(JobError):
    """No master answers at the endpoint."""

    exit_code = EXIT_NO_WORLD


class LeadershipLost(JobError):
    """Somebody else is, or may by now be, the job's master: this process must stop deciding at once."""


class CacheError(StokerError):
    """The cache could not give what was asked for."""

    exit_code = EXIT_DATA


class ObjectNotFound(CacheError):
    """The origin has no such object, or there is no such bucket."""


class ObjectChanged(CacheError):
    """The object's version changed under a reader: open it again to read the new one."""


class PreconditionFailed(ObjectChanged):
    """What is there is not what a write was to replace: nothing was written."""


class WriteRefused(CacheError):
    """The origin answers, and does not take what is written: nothing was."""


class OriginReadOnly(WriteRefused):
    """The origin cannot be written to, or not in this way."""


class WriteDenied(WriteRefused):
    """The origin does not let us write: keys, file permissions, or an owner that files cannot be given to."""


class OriginFull(WriteRefused):
    """The origin has no room, or a quota there is used up."""


class BadKey(WriteRefused):
    """The origin can have no object of that name, or not beside those that it has."""


class ObjectTooLarge(WriteRefused):
    """The origin takes no object of that size."""


class WrongBodyLength(WriteRefused):
    """What was to be written is not as long as was announced."""


class WrongChecksum(WriteRefused):
    """What came to be written is not what its sender says of it."""


class NoSuchUpload(WriteRefused):
    """An upload in parts that was never begun, or has ended."""


class BadParts(WriteRefused):
    """Parts of an upload that are not there, not in order, or too small. `code`: what S3 calls it."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class CorruptBlock(CacheError):
    """Cached bytes do not match their checksum."""


class CacheUnavailable(CacheError):
    """No cache server answers."""


class AnotherOrigin(CacheError):
    """A server has a bucket of that name, and its bytes come from another origin than those of who asks."""


class OriginError(CacheError):
    """The origin failed: it is unreachable, refuses, or answers nonsense."""


class OriginBusy(OriginError):
    """The origin fails in a way that passes: it cannot be reached, has too much to do, or says that something is wrong
    with it. What changes nothing when it is done twice may be tried again."""


class ShortBody(OriginError):
    """The origin sent another number of bytes than it announced."""


class DataError(StokerError):
    """The dataset cannot be read as asked."""

    exit_code = EXIT_DATA


class EmptyDataset(DataError):
    """There are no records under the dataset's URL."""


class BadRecord(DataError):
    """A record is damaged, or `decode` rejected it; the message names the record and the reason."""


class DatasetChanged(DataError):
    """The set of records, or what is in them, is not what the run started with."""
