"""The end of a process by SIGKILL at a chosen moment; for processes of `forked.call`."""

import os
import signal


def kill_self(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_after(count, function):
    """The function, whose call number `count` + 1 is the end of the process."""
    calls = []

    def counted(*given, **named):
        calls.append(1)
        if len(calls) > count:
            kill_self()
        return function(*given, **named)

    return counted
