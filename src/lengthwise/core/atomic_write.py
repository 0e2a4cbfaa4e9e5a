"""Folders and files that are written whole or not at all, and the words for what the file system refuses."""

import errno
import hashlib
import os
import shlex
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lengthwise.core.errors import InputError
from lengthwise.core.machine import machine, runs
from lengthwise.core.wording import bytes_in_words, needed_and_available

_DISK = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ENOENT, errno.ENOTDIR, errno.EISDIR,
    errno.EACCES, errno.EPERM, errno.ESTALE, errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE, errno.ENFILE, errno.EEXIST,
    errno.ENODEV, errno.ENXIO, errno.ENOTEMPTY, errno.EBUSY, errno.ENOTSUP,
}  # fmt: skip
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE}
"""No bug of a program causes these, unlike a missing file."""
_PROBE = ".writable-"
"""How names of files begin that say nothing but that a folder can be written."""
_STALE_S = 86_400


def shown(path: Path | str) -> str:
    """A path for a message, on one line whatever characters it has, shortened if it is of a length no path has."""
    text = str(path) if len(str(path)) <= 1000 else f"{str(path)[:1000]}..."
    return text if text.isprintable() else repr(text)


def shell_word(path: Path | str) -> str:
    """A path as one word of a command that a message gives to be copied."""
    return shell_quoted(str(path)) if len(str(path)) <= 1000 else shlex.quote(shown(path))


def shell_quoted(text: str) -> str:
    """Quote ``text`` as one word for a shell, on one line; what is not printable is named by its bytes."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, text)) + "'"


def _escaped(char: str) -> str:
    if char in "'\\":
        return f"\\{char}"
    if char.isprintable():
        return char
    as_byte = "surrogateescape" if 0xDC80 <= ord(char) <= 0xDCFF else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", as_byte))


def reason(error: OSError) -> str:
    """What the file system refused, in words: the system's, and the file if it names one."""
    words = error.strerror or str(error) or type(error).__name__
    return f"{words}: {shown(error.filename)}" if isinstance(error.filename, str) else words


def is_of_disk(error: BaseException | None) -> bool:
    """Whether a file or a disk is to blame, and not a connection."""
    return isinstance(error, OSError) and error.errno in _DISK


def space_left(folder: Path, why: str, *, needed_bytes: int) -> str:
    """What is needed and what is free where ``why`` says that a disk or a quota is full; an empty string: it does not.

    ``folder``: where so many bytes were to be written, or one that is to be made.
    """
    is_quota = os.strerror(errno.EDQUOT) in why
    if not (is_quota or os.strerror(errno.ENOSPC) in why):
        return ""
    needed = bytes_in_words(needed_bytes)
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return f": it takes {needed}, and what is free cannot be told ({reason(error)})"
    if (free := bytes_in_words(free_bytes)) == needed:
        needed, free = needed_and_available(needed_bytes, free_bytes)
    return f": it takes {needed}, and the disk has {free} free" + (", or less by a quota" if is_quota else "")


def full_disk_behind(error: BaseException) -> OSError | None:
    """The refusal of a full or broken disk that led to ``error``, which may say nothing of it; None: there was none.

    torch's writer raises that a position is unexpected where the file under it could not grow.
    """
    seen: set[int] = set()
    following: list[BaseException | None] = [error]
    while following:
        link = following.pop()
        if link is None or id(link) in seen:
            continue
        if isinstance(link, OSError) and link.errno in _FULL:
            return link
        seen.add(id(link))
        following += [link.__context__, link.__cause__]
    return None


def make_folder(path: Path, *, setting: str, way_out: str = "name another folder") -> list[Path]:
    """Make a folder with its parents, in which files can be written; returns the new ones, the outermost first.

    Raises:
        InputError: it cannot be made or written; ``setting`` is what names it. Nothing is left behind.
    """
    made: list[Path] = []
    try:
        missing: list[Path] = []
        parent = path
        while not os.path.lexists(parent):
            missing.append(parent)
            parent = parent.parent
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            made.append(folder)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        with tempfile.TemporaryFile(dir=path, prefix=_PROBE) as probe:  # has no name, where the file system can do that
            probe.write(b"?")
            probe.flush()
    except BaseException as error:
        remove_empty(made)
        if not isinstance(error, OSError | ValueError):  # the latter for a null character
            raise
        words = reason(error) if isinstance(error, OSError) else str(error)
        raise InputError(f"{setting} {shown(path)} cannot be written ({words}); {way_out}") from None
    return made


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove what :func:`make_folder` made as far as nothing was put in it."""
    for folder in reversed(folders):
        with suppress(OSError):
            folder.rmdir()


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, also if the power goes; the file behind a link, or into a device or FIFO."""
    if is_stream(path):
        write_stream(path, text.encode())
        return
    place = behind_links(path)
    partial = partial_of(place)
    remove_stale(place)
    try:
        with partial.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(place)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def partial_of(place: Path) -> Path:
    """The name that a file or folder has beside ``place`` until it is whole: of this process of this machine."""
    return place.with_name(f"{_stem(place)}{_tag()}-{os.getpid()}")


def remove_stale(place: Path) -> None:
    """Remove what processes that are gone left beside ``place``, as they were killed while they wrote it.

    Of another machine, or from before it was started again, what nothing was written to for a day.
    """
    stem = _stem(place)
    with suppress(OSError):
        for left in [Path(item) for item in os.scandir(place.parent) if item.name.startswith(stem)]:
            tag, _, process = left.name.removeprefix(stem).rpartition("-")
            is_here = tag == _tag() and process.isdecimal()
            is_gone = not runs(int(process)) if is_here else time.time() - left.stat().st_mtime > _STALE_S
            if is_gone and left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            elif is_gone:
                left.unlink(missing_ok=True)


def _stem(place: Path) -> str:
    return f".{place.name[:100]}.partial-"


def _tag() -> str:
    return hashlib.blake2b(machine().encode(), digest_size=4).hexdigest()


def is_stream(path: Path) -> bool:
    """Whether ``path`` is a device, a FIFO or what stdout goes to: text is written into it, nothing replaces it."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)) or _is_stdout(status)


def write_stream(path: Path, content: bytes) -> None:
    """Write into a device or FIFO, which waits for its reader; what stdout goes to is not opened a second time."""
    if _is_stdout(path.stat()):
        sys.stdout.flush()
        descriptor = os.dup(1)
    else:
        descriptor = os.open(path, os.O_WRONLY)
    with open(descriptor, "wb") as stream:
        stream.write(content)


def behind_links(path: Path) -> Path:
    """The file that a symbolic link leads to, which may have to be made; ``path`` itself if it is no link.

    Raises:
        OSError: the link leads in a circle.
    """
    if not path.is_symlink():
        return path
    place = Path(os.path.realpath(path))
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return place


def _is_stdout(status: os.stat_result) -> bool:
    with suppress(OSError):  # stdout may be closed
        return os.path.samestat(status, os.fstat(1))
    return False


@contextmanager
def new_folder(path: Path, *, setting: str) -> Iterator[Path]:
    """A folder to fill, which gets the name ``path`` when all went well and is removed if not.

    Raises:
        InputError: ``path`` is there already and not an empty folder, or cannot be written.
    """
    check_free(path, setting=setting)
    remove_stale(path)
    partial, made = partial_of(path), make_folder(path, setting=setting)
    try:
        _make_partial(partial, path, setting)
        yield partial
        if made:
            partial.replace(path)
        else:  # it may be the working folder, or where a disk is mounted
            for item in partial.iterdir():
                item.replace(path / item.name)
            partial.rmdir()
            for probe in path.glob(f"{_PROBE}*"):  # of a process that was killed
                probe.unlink()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        remove_empty(made)
        raise


def _make_partial(partial: Path, path: Path, setting: str) -> None:
    try:
        partial.mkdir()
    except OSError as error:
        raise InputError(f"{setting} {shown(path)} cannot be written ({reason(error)}); name another folder") from None


def check_free(path: Path, *, setting: str) -> None:
    """Raise ``InputError`` unless ``path`` is not there or is an empty folder."""
    try:
        if path.is_symlink():
            raise InputError(f"{setting} {shown(path)} is a symbolic link; name a new folder, or the one it points to")
        if path.exists() and not path.is_dir():
            raise InputError(f"{setting} {shown(path)} is a file; name a new folder")
        if path.is_dir() and not all(item.name.startswith(_PROBE) for item in path.iterdir()):
            raise InputError(f"{setting} {shown(path)} is not empty; name a new folder")
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        words = reason(error) if isinstance(error, OSError) else str(error)
        raise InputError(f"{setting} {shown(path)} cannot be used ({words}); name another folder") from None
