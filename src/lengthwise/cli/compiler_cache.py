"""Compiled code in a run folder is native code: it is loaded only where this user's runs have made it.

A mark in the folder proves that: a code over the folder's place on its disk, with a secret that lies in the user's
home. A folder that was copied or unpacked, by whomever, has none that fits, and its code is made anew.
"""

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from lengthwise.core.atomic_write import write_text
from lengthwise.core.cache_folder import cache_folder

_MARK = "made_by_this_user"


def set_aside_foreign(compiler: Path) -> Path | None:
    """Make the folder of compiled code this user's; one that is not is renamed, and its new name returned.

    Raises:
        OSError: the run folder cannot be written.
    """
    secret = _secret()
    aside = None
    if os.path.lexists(compiler) and not _is_own(compiler, secret):
        aside = compiler.with_name(f"{compiler.name}.foreign-{secrets.token_hex(4)}")
        compiler.rename(aside)
    compiler.mkdir(exist_ok=True)
    write_text(compiler / _MARK, _code(compiler, secret))
    return aside


def _is_own(compiler: Path, secret: bytes) -> bool:
    try:
        mark = (compiler / _MARK).read_text()
        return not compiler.is_symlink() and hmac.compare_digest(mark.encode(), _code(compiler, secret).encode())
    except (OSError, ValueError):
        return False


def _code(compiler: Path, secret: bytes) -> str:
    status = compiler.stat()
    return hmac.new(secret, f"{status.st_dev} {status.st_ino}".encode(), hashlib.sha256).hexdigest()


def _secret() -> bytes:
    """The secret of this user, made at first use; where no home can keep it, one for this process alone."""
    file = cache_folder() / "secret"
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            os.write(descriptor, secrets.token_bytes(32))
            os.close(descriptor)
        if len(secret := file.read_bytes()) == 32:
            return secret
    return secrets.token_bytes(32)
