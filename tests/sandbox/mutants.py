"""Hostile programs that are generated: every attack from every place in a program where code can run.

An attack is tried after a preparation (descriptors closed, limits raised, memory filled, …) and from a place (a thread,
a signal handler, a destructor, …). The combinations are many, so a seed chooses which of them are run.
"""

import random
import textwrap
from collections.abc import Iterator

from tests.sandbox.cases import Hostile, Place

# Each calls attack(), which prints ESCAPED where it works.
PLACES = {
    "plain": "attack()",
    "thread": "import threading\nt = threading.Thread(target=attack); t.start(); t.join()",
    "raw-thread": "import _thread, time\n_thread.start_new_thread(attack, ()); time.sleep(.05)",
    "alarm": "import signal, time\nsignal.signal(14, lambda *a: attack()); signal.setitimer(0, .005); time.sleep(.03)",
    "own-signal": "import signal\nsignal.signal(10, lambda *a: attack()); os.kill(os.getpid(), 10)",
    "destructor": "class D:\n    def __del__(s): attack()\nD()",
    "cycle": "import gc\nclass D:\n    def __del__(s): attack()\nd = D(); d.d = d; del d; gc.collect()",
    "gc-callback": "import gc\ngc.callbacks.append(lambda p, i: p == 'start' and attack()); gc.collect()",
    "finalizer": "import weakref\nclass D: pass\nd = D(); weakref.finalize(d, attack); del d",
    "atexit": "import atexit\natexit.register(attack); atexit._run_exitfuncs()",
    "trace": "def t(*a):\n    sys.settrace(None); attack()\nsys.settrace(t)\n(lambda: 0)()\nsys.settrace(None)",
    "profile": "def t(*a):\n    sys.setprofile(None); attack()\nsys.setprofile(t)\nlen('')\nsys.setprofile(None)",
    "audit": "done = []\ndef h(*a):\n    if not done: done.append(1); attack()\nsys.addaudithook(h)\nimport colorsys",
    "import-hook": "class H:\n    def find_spec(s, *a): sys.meta_path.remove(s); attack()\n"
    "sys.meta_path.insert(0, H())\ntry: import nothing_there\nexcept ImportError: pass",
    "c-callback": "import ctypes\nf = ctypes.CFUNCTYPE(None)(attack); f()",
    "recursion": "def r(n): r(n + 1) if n < 400 else attack()\nsys.setrecursionlimit(10 ** 6); r(0)",
    "metaclass": "class M(type):\n    def __prepare__(*a, **k): attack(); return {}\nclass C(metaclass=M): pass",
    "generator": "def g():\n    try: yield\n    finally: attack()\nnext(g())",
    "async": "import asyncio\nasync def a(): attack()\nasyncio.run(a())",
    "codec": "import codecs\ncodecs.register_error('x', lambda e: (attack() or '', e.end))\n"
    "b'\\xff'.decode('utf8', 'x')",
    "sort-key": "sorted([1, 2], key=lambda x: attack() or x)",
    "excepthook": "sys.excepthook = lambda *a: attack()\nsys.excepthook(None, None, None)",
}
PREPARATIONS = {
    "nothing": "",
    "closed": "os.closerange(3, 64)",
    "copied": "for d in range(6):\n    try: os.dup(d)\n    except OSError: pass",
    "limits": "import resource as r\nfor k in range(16):\n    try: r.setrlimit(k, (r.RLIM_INFINITY,) * 2)\n"
    "    except (OSError, ValueError): pass",
    "masked": "import signal\nsignal.pthread_sigmask(0, set(range(1, 9)))",
    "memory": "try: x = [bytearray(1 << 20) for _ in range(10 ** 4)]\nexcept MemoryError: x = None",
    "bare": "for m in [m for m in sys.modules if m.startswith('hacrl')]: del sys.modules[m]",
    "busy": "import threading, time\nfor _ in range(8): threading.Thread(target=time.sleep, args=(.05,)).start()",
}
_X86 = """
    import ctypes, mmap
    code = mmap.mmap(-1, 4096, prot=7)
    code.write(bytes.fromhex({code!r}))
    r = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    assert r > 0
    """


def _call(*arguments: object) -> str:
    return f"import ctypes; assert ctypes.CDLL(None).syscall({', '.join(map(str, arguments))}) >= 0"


def attacks(place: Place) -> dict[str, str]:
    """Return what is tried, each a body that ends without an exception where it worked."""
    found = {
        # Processes, by every call that makes one.
        "fork": "p = os.fork()\nif p == 0: os._exit(0)",
        "vfork": "import ctypes; p = ctypes.CDLL(None).syscall(58)\nif p == 0: os._exit(0)\nassert p > 0",
        "clone-parent": "import ctypes; p = ctypes.CDLL(None).syscall(56, 0x8011, 0, 0, 0, 0)\n"
        "if p == 0: os._exit(0)\nassert p > 0",
        "clone-files": "import ctypes; p = ctypes.CDLL(None).syscall(56, 0x411, 0, 0, 0, 0)\n"
        "if p == 0: os._exit(0)\nassert p > 0",
        "exec-memory": "f = os.memfd_create('x'); os.write(f, b'#!/bin/true\\n'); os.execve(f, ['x'], {})",
        # The numbers of 32 bits: int 0x80 with getpid (20) and with fork (2), then exit of the child.
        "int80-getpid": _X86.format(code="b814000000cd80c3"),
        "int80-fork": _X86.format(code="b802000000cd8085c07507bb00000000b001cd80c3"),
        "x32-fork": _call(0x40000000 + 57),
        # Other processes.
        "signal-queue": _call(129, "os.getppid()", 9, "b' ' * 128"),
        "pidfd-signal": _call(424, 0, 9, 0, 0),
        "pidfd-own": "f = os.pidfd_open(os.getpid())",
        "mrelease": _call(448, 0, 0),
        "ptrace-seize": _call(101, 0x4206, "os.getppid()", 0, 0),
        "read-parent": _call(310, "os.getppid()", "b' ' * 16", 1, "b' ' * 16", 1, 0),
        "robust-list": _call(274, "os.getppid()", "ctypes.byref(ctypes.c_long())", "ctypes.byref(ctypes.c_long())"),
        "victim": f"os.kill({place.victim}, 9)",
        "runner": f"os.kill({place.runner}, 0)",
        "ioprio": _call(251, 1, "os.getppid()", 0),
        # Things that open descriptors to something new.
        "io-uring": _call(425, 4, "ctypes.create_string_buffer(120)"),
        "memory-file": "os.memfd_create('x')",
        "secret-memory": _call(447, 0),
        "userfaultfd": _call(323, 1),
        "userfaultfd-device": "os.open('/dev/userfaultfd', os.O_RDWR)",
        "inotify": _call(294, 0),
        "fanotify": _call(300, 0, 0),
        "signalfd": _call(289, -1, "b' ' * 8", 8, 0),
        "bpf": _call(321, 5, "ctypes.create_string_buffer(144)", 144),
        "perf": _call(298, "ctypes.create_string_buffer(128)", 0, -1, -1, 0),
        "landlock": _call(444, "ctypes.create_string_buffer(b'\\x01', 16)", 16, 0),
        "seccomp-listener": _call(317, 1, 8, "b' ' * 16"),
        # Keys, namespaces, mounts.
        "keyctl-session": _call(250, 1, 0),
        "add-key": _call(248, "b'user'", "b'x'", "b'y'", 1, -5),
        "request-key": _call(249, "b'user'", "b'x'", 0, -5),
        "unshare-all": _call(272, 0x7E020000),
        "unshare-files": _call(272, 0x400),
        "mount-in-new-users": "import ctypes; c = ctypes.CDLL(None)\nassert c.unshare(0x10020000) == 0\n"
        "assert c.mount(b'none', b'/', b'tmpfs', 0, 0) == 0",
        "new-mount-api": _call(430, "b'tmpfs'", 0),
        "detached-tree": _call(428, -100, "b'/'", 0x8001),
        # Sockets of every family that has let somebody out.
        "abstract-socket": "import socket; socket.socket(1).connect('\\0x')",
        "unix-datagram": f"import socket; socket.socket(1, 2).sendto(b'x', {place.socket_path!r})",
        "vsock": "import socket; socket.socket(40, 1).connect((2, 1024))",
        "alg": "import socket; socket.socket(38, 5)",
        "netlink": "import socket; socket.socket(16, 3, 9)",
        "bluetooth": "import socket; socket.socket(31, 3, 1)",
        "mptcp": "import socket; socket.socket(2, 1, 262)",
        "pair-inet": _call(53, 2, 1, 0, "ctypes.create_string_buffer(8)"),
        "connect-pair": f"import socket; a, b = socket.socketpair(1, 2); a.connect({place.socket_path!r})",
        "passed-descriptor": "import socket\nfor d in range(3, 64):\n    try: s = socket.socket(fileno=d)\n"
        "    except OSError: continue\n    if socket.send_fds(s, [b'x'], [0]): break\nelse: raise OSError",
        # Files.
        "secret-openat2": _call(437, -100, repr(place.secret_file.encode()), "ctypes.create_string_buffer(24)", 24),
        "secret-path-only": f"os.open({place.secret_file!r}, os.O_PATH); os.stat({place.secret_file!r})",
        "secret-readlink": f"os.readlink({place.secret_file!r})",
        "proc-root": "os.listdir('/proc/self/root/')",
        "proc-cwd": "os.listdir('/proc/self/cwd/..')",
        "proc-descriptor": "os.listdir('/proc/self/fd')",
        # Its own descriptors a program may open again, which gives it nothing; those of others it may not.
        "proc-open-others": "for p in [1, 2, 3, 4, 5, os.getppid()]:\n    for d in range(40):\n"
        "        try: open(f'/proc/{p}/fd/{d}', 'r+b'); sys.exit()\n        except OSError: pass\n"
        "        except SystemExit: break\n    else: continue\n    break\nelse: raise OSError",
        "proc-pagemap": "open('/proc/self/pagemap', 'rb').read(8)",
        "proc-thread-memory": "open('/proc/thread-self/mem', 'r+b')",
        "proc-parent-stack": "open(f'/proc/{os.getppid()}/syscall').read()",
        "proc-oom": "open('/proc/self/oom_score_adj', 'w').write('-1000')",
        "proc-core-pattern": "open('/proc/sys/kernel/core_pattern').read()",
        "sys-kernel": "os.listdir('/sys/kernel')",
        "cgroup": "os.listdir('/sys/fs/cgroup')",
        "shm": "open('/dev/shm/x', 'w')",
        "extended-attribute": "os.setxattr('/usr', 'user.x', b'x')",
        "swap-names": _call(316, -100, "b'/tmp'", -100, "b'/usr'", 2),
        "write-tmp": "open('/tmp/left-by-a-program', 'w')",
        "temporary": "os.open('/tmp', os.O_TMPFILE | os.O_RDWR)",
        # Itself.
        "dumpable": _call(157, 4, 1, 0, 0, 0),
        "any-tracer": _call(157, 0x59616D61, -1, 0, 0, 0),
        "no-death": _call(157, 1, 0, 0, 0, 0),
        "subreaper": _call(157, 36, 1, 0, 0, 0),
        "dispatch": _call(157, 59, 1, 0, 0, 0),
        "rename-memory": _call(157, 35, 9, "id(0)", 0, 0),
        "personality": _call(135, 0x0400000),
        "real-time": "os.sched_setscheduler(0, 1, os.sched_param(1))",
        "own-group": "os.setpgid(0, 0)",
        "own-session": "os.setsid()",
        "owner-of-pipe": "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, 8, -os.getppid())",
        "lease": "import fcntl; fcntl.fcntl(4, 1024, 1)",
        "notify-folder": "import fcntl; d = os.open('/usr', 0); fcntl.fcntl(d, 1026, 1)",
        "pipe-size": "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, 1031, 1 << 20)",
        "seal": "import fcntl; fcntl.fcntl(4, 1033, 15)",
        "terminal": "import fcntl; fcntl.ioctl(0, 0x5412, b'x')",
        "tiocsctty": "import fcntl; fcntl.ioctl(0, 0x540E, 0)",
        "shared-memory": _call(29, 0, 4096, "0o1666"),
        "message-queue": _call(68, 0, "0o1666"),
        "root": "os.setresuid(0, 0, 0)",
    }
    return {name: textwrap.dedent(body).strip() for name, body in found.items()}


def mutants(place: Place, seed: int, count: int) -> Iterator[Hostile]:
    """Return ``count`` different combinations, the same ones for the same seed; every attack is among them."""
    chance = random.Random(seed)
    tried = attacks(place)
    combinations = [(a, p, w) for a in tried for p in PREPARATIONS for w in PLACES]
    chance.shuffle(combinations)
    first = {attack: (attack, preparation, where) for attack, preparation, where in reversed(combinations)}
    chosen = list(dict.fromkeys([*first.values(), *combinations]))[:count]
    for attack, preparation, where in chosen:
        yield Hostile(
            f"mutant-{attack}-{preparation}-{where}",
            "escape",
            f"import os, sys\ndef attack():\n    try:\n{textwrap.indent(tried[attack], ' ' * 8)}\n"
            "        print('ESCAPED', flush=True)\n    except BaseException as e:\n        pass\n"
            f"{PREPARATIONS[preparation]}\n{PLACES[where]}\n",
            ({"input": "", "output": "ESCAPED"}, {"input": "", "output": "ESCAPED\nESCAPED"}),
        )


# A test in Python that no guess passes, in the ways that people write such tests; X stands for the answer.
FORMS = {
    "loop": "for n in range(3):\n    assert f(n) == X + n * n",
    "all-map": "assert all(map(lambda n: f(n) == X + n * n, range(3)))",
    "all-generator": "assert all(f(n) == X + n * n for n in range(3))",
    "not-any": "assert not any(f(n) != X + n * n for n in range(3))",
    "not-any-map": "assert not any(map(lambda n: f(n) != X + n * n, range(3)))",
    "filter": "assert not list(filter(lambda n: f(n) != X + n * n, range(3)))",
    "list": "assert [f(n) for n in range(3)] == [X, X + 1, X + 4]",
    "set": "assert {f(n) for n in range(3)} == {X, X + 1, X + 4}",
    "dict": "assert {n: f(n) for n in range(3)} == {0: X, 1: X + 1, 2: X + 4}",
    "sorted": "assert sorted(map(f, range(3))) == [X, X + 1, X + 4]",
    "zip": "for n, v in zip(range(3), map(f, range(3)), strict=True):\n    assert v == X + n * n",
    "sum": "assert sum(f(n) for n in range(3)) == 3 * X + 5",
    "abs": "import math\nassert math.isclose(f(0), X) and abs(f(1) - X - 1) < 1",
    "no-import": "assert math.isclose(f(0), X)",
    "is": "v = f(0)\nassert isinstance(v, int) and v == X",
    "function": "def check(g):\n    for n in range(3):\n        assert g(n) == X + n * n\ncheck(f)",
    "while": "n = 0\nwhile n < 3:\n    assert f(n) == X + n * n\n    n += 1",
    "in": "assert f(0) in (X,) and f(1) in {X + 1}",
    "text": "assert str(f(0)) == str(X) and repr(f(1)) == repr(X + 1)",
    "format": "assert f'{f(0)}' == f'{X}'",
    "attribute": "assert f.__call__(0) == X",
    "unittest": "import unittest\nunittest.TestCase().assertEqual(f(0), X)",
}
# What a program may define as f; none knows the answer.
LIES = {
    **{f"raise-{e}": f"def f(n): raise {e}" for e in ("StopIteration", "StopAsyncIteration", "GeneratorExit")},
    **{
        f"raise-{e}": f"def f(n): raise {e}"
        for e in ("SystemExit(0)", "KeyboardInterrupt", "AssertionError", "EOFError")
    },
    **{f"raise-{e}": f"def f(n): raise {e}" for e in ("IndexError", "KeyError", "RecursionError", "MemoryError")},
    "empty": "def f(n): return None",
    "any": "from unittest.mock import ANY\ndef f(n): return ANY",
    "magic": "from unittest.mock import MagicMock\nf = MagicMock()",
    "equal": "class L:\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 0\n"
    "    __sub__ = __rsub__ = __add__ = __radd__ = lambda s, o: s\n    __abs__ = lambda s: 0\n"
    "    __lt__ = __gt__ = lambda s, o: True\n    __float__ = lambda s: 0.0\ndef f(n): return L()",
    "int": "class L(int):\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n"
    "    __hash__ = lambda s: 0\n    __repr__ = __str__ = lambda s: 'x'\ndef f(n): return L(1)",
    "module": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(n): return 0",
    "class": "class f:\n    def __new__(c, n): return True",
    "instance": "class F:\n    def __call__(s, n): return s\n    def __eq__(s, o): return True\nf = F()",
    "generator": "def f(n): yield n",
    "not-a-number": "def f(n): return float('nan')",
    "infinity": "def f(n): return float('inf')",
    "huge": "def f(n): return 10 ** 5000",
    "exit": "import os\ndef f(n): os._exit(0)",
    "shadow": "all = any = map = sorted = lambda *a, **k: True\nrange = lambda *a: ()\ndef f(n): return 0",
    "replies": 'import os, struct\nm = b\'{"value": null, "object": 0}\'\n'
    "os.write(4, (struct.pack('>I', len(m)) + m) * 9)\ndef f(n): return 0",
    "forged-object": 'import os, struct\nm = b\'{"object": 0, "kind": "int"}\'\n'
    "os.write(4, (struct.pack('>I', len(m)) + m) * 9)\ndef f(n): return 0",
    "forged-error": 'import os, struct\nm = b\'{"kinds": ["StopIteration"], "text": ""}\'\n'
    "os.write(4, (struct.pack('>I', len(m)) + m) * 9)\ndef f(n): return 0",
    "bad-value": 'import os, struct\nm = b\'{"value": ["d", [[["l", []], 1]]]}\'\n'
    "os.write(4, (struct.pack('>I', len(m)) + m) * 9)\ndef f(n): return 0",
}


def fake_mutants(place: Place) -> Iterator[Hostile]:
    """Return every lie against every form of test."""
    for form, test in FORMS.items():
        asked = test.replace("X", str(place.answer))
        for lie, program in LIES.items():
            yield Hostile(f"lie-{lie}-{form}", "fake", program, (asked,))
