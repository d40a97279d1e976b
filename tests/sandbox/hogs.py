"""Programs that use up time, memory, threads, descriptors or output, crash, or refuse to end."""

import textwrap
from collections.abc import Iterator

from tests.sandbox.cases import Hostile, Place


def _hog(name: str, body: str, *, slow: bool = True) -> Hostile:
    return Hostile(f"hog-{name}", "hog", textwrap.dedent(body), ({"input": "1", "output": "never"},), slow=slow)


def hogs(place: Place) -> Iterator[Hostile]:
    """Use up time, memory, threads, descriptors, output; crash; refuse to end."""
    yield _hog("loop", "while True: pass")
    yield _hog("loop-catching", "while True:\n    try:\n        while True: pass\n    except BaseException: pass")
    yield _hog("power", "x = 9 ** 9 ** 9")
    yield _hog("sum", "sum(range(10 ** 13))")
    yield _hog("regular-expression", "import re; re.match('(a+)+$', 'a' * 50 + 'b')")
    yield _hog("product", "import itertools\nfor _ in itertools.product(range(100), repeat=20): pass")
    yield _hog("string", "int('9' * 4000) ** 100000")
    yield _hog("sleep", "import time; time.sleep(10 ** 6)")
    yield _hog("select", "import select; select.select([], [], [])")
    yield _hog("pause", "import signal; signal.pause()")
    yield _hog("event", "import threading; threading.Event().wait()")
    yield _hog("deadlock", "import threading; l = threading.Lock(); l.acquire(); l.acquire()")
    yield _hog("pipe", "import os; r, w = os.pipe(); os.read(r, 1)")
    yield _hog("full-pipe", "import os; r, w = os.pipe(); os.write(w, b'x' * (1 << 22))")
    yield _hog("stop-itself", "import os; os.kill(os.getpid(), 19)")
    yield _hog("deaf", "import signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
               "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)")  # fmt: skip
    yield _hog("blocked-signals", "import signal\nsignal.pthread_sigmask(0, range(1, 65))\nwhile True: pass")
    yield _hog("atexit", "import atexit\n@atexit.register\ndef f():\n    while True: pass", slow=False)
    yield _hog("destructor", "class A:\n    def __del__(self):\n        while True: pass\na = A()", slow=False)
    yield _hog("threads-outlive", "import threading, time\nfor _ in range(8): "
               "threading.Thread(target=time.sleep, args=(10 ** 6,)).start()", slow=False)  # fmt: skip
    yield _hog("spinning-threads", "import threading\ndef f():\n    while True: pass\n"
               "for _ in range(8): threading.Thread(target=f).start()\nf()")  # fmt: skip
    yield _hog("thread-bomb", "import threading, time\nthreading.stack_size(32768)\n"
               "while True: threading.Thread(target=time.sleep, args=(10 ** 6,)).start()", slow=False)  # fmt: skip
    yield _hog("memory-list", "x = []\nwhile True: x.append(' ' * 10 ** 6)", slow=False)
    yield _hog("memory-at-once", "x = bytearray(1 << 40)", slow=False)
    yield _hog("memory-mmap", "import mmap\nx = [mmap.mmap(-1, 1 << 24) for _ in range(10 ** 6)]", slow=False)
    yield _hog("memory-catching", "x = []\nwhile True:\n    try: x.append(bytearray(1 << 20))\n"
               "    except MemoryError: pass")  # fmt: skip
    yield _hog("memory-nested", "x = []\nwhile True: x = [x, x]", slow=True)
    yield _hog("memory-pipes", "import os\nwhile True:\n    r, w = os.pipe(); os.write(w, b'x' * 60000)", slow=False)
    yield _hog("descriptors", "x = [open('/dev/null') for _ in range(10 ** 6)]", slow=False)
    yield _hog("output", "while True: print('x' * 10 ** 6)", slow=False)
    yield _hog("output-os", "import os\nwhile True: os.write(1, b'x' * 10 ** 6)", slow=False)
    yield _hog(
        "output-catching", "import os\nwhile True:\n    try: os.write(1, b'x' * 10 ** 6)\n    except OSError: pass"
    )
    yield _hog("output-errors", "import sys\nfor _ in range(200): sys.stderr.write('x' * 10 ** 6)", slow=False)
    yield _hog("output-seek", "import os\nos.lseek(1, 1 << 40, 0)\nos.write(1, b'x')", slow=False)
    yield _hog("output-truncate", "import os\nos.ftruncate(1, 1 << 40)", slow=False)
    yield _hog("recursion", "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): return f()\nf()", slow=False)
    yield _hog("null-pointer", "import ctypes; ctypes.string_at(0)", slow=False)
    yield _hog("abort", "import os; os.abort()", slow=False)
    yield _hog("kill-itself", "import os; os.kill(os.getpid(), 9)", slow=False)
    yield _hog("bad-code", "f = lambda: 0\nf.__code__ = f.__code__.replace(co_code=b'\\xff' * 100)\nf()", slow=False)
    yield _hog("close-all", "import os; os.closerange(0, 1000)", slow=False)
    yield _hog("nested-source", "(" * 5000 + ")" * 5000, slow=False)
    yield _hog("large-source", "x = 1\n" * 50000, slow=False)
    yield _hog("nul-source", "x = 1\0", slow=False)
    yield _hog("lower-limits", "import resource as r\nr.setrlimit(r.RLIMIT_CPU, (0, 0))\nwhile True: pass", slow=True)
    yield _hog("raise-limits", "import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))\nx = bytearray(1 << 33)",
               slow=False)  # fmt: skip
    yield _hog("timer", "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\nwhile True:\n    try: "
               "signal.pause()\n    except BaseException: pass", slow=False)  # fmt: skip
