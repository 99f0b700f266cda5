"""The system's own lock on an open file: it ends with the process that holds it, so a crash or a kill leaves none behind."""

from __future__ import annotations

import errno
import sys

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""What a file system without locks answers; EBADF is that of NFS for a folder, whose handle cannot write."""


def take_lock(handle: int) -> bool:
    """Whether this process holds the lock now; True without one where the system or the file system has no locks."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
