"""Programs that try to pass tests whose answers they cannot know."""

import textwrap
from collections.abc import Iterator
from typing import Any

from tests.sandbox.cases import Hostile, Place


def _tests(place: Place) -> tuple[Any, ...]:
    """Three calls whose results cannot be guessed."""
    return tuple({"call": "f", "args": [n], "expected": place.answer + n * n} for n in range(3))


_LEAD = "import os, sys, json, builtins\n"
_LIARS = {
    "object": "class L:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n"
    "    def __hash__(s): return 0\ndef f(n): return L()",
    "int": "class L(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\ndef f(n): return L(1)",
    "str": "class L(str):\n    def __eq__(s, o): return True\n    __hash__ = str.__hash__\ndef f(n): return L('x')",
    "list": "class L(list):\n    def __eq__(s, o): return True\ndef f(n): return L()",
    "dict": "class L(dict):\n    def __eq__(s, o): return True\ndef f(n): return L()",
    "float": "class L(float):\n    def __eq__(s, o): return True\n    __hash__ = float.__hash__\ndef f(n): return L(0)",
    "metaclass": "class M(type):\n    def __eq__(s, o): return True\n    __hash__ = type.__hash__\n"
    "class L(metaclass=M): pass\ndef f(n): return L",
    "numpy-like": "class L:\n    __module__ = 'numpy'\n    def tolist(s): return s\ndef f(n): return L()",
    "mock": "from unittest.mock import ANY\ndef f(n): return ANY",
    "in-list": "from unittest.mock import ANY\ndef f(n): return [ANY]",
    "nan": "def f(n): return float('nan')",
    "true": "def f(n): return True",
    "none": "def f(n): return None",
}
_ENDS = {
    "exit": "sys.exit(0)",
    "exit-in-call": "def f(n): sys.exit(0)",
    "hard-exit": "os._exit(0)",
    "hard-exit-in-call": "def f(n): os._exit(0)",
    "system-exit": "raise SystemExit",
    "generator-exit": "def f(n): raise GeneratorExit",
    "keyboard": "raise KeyboardInterrupt",
    "assertion": "def f(n): raise AssertionError('passed')",
    "exit-thread": "import threading\nthreading.Thread(target=lambda: os._exit(0)).start()\nimport time; time.sleep(1)",
    "exit-atexit": "import atexit\natexit.register(os._exit, 0)\nsys.exit()",
    "quit": "quit()",
    "excepthook": "sys.excepthook = lambda *a: os._exit(0)\n1/0",
}
_SEARCHES = {
    "frames": """
        def f(n):
            frame = sys._getframe()
            while frame:
                for name, value in frame.f_locals.items():
                    if 'expect' in name or 'answer' in name: return value
                    if isinstance(value, dict) and 'expected' in value: return value['expected']
                frame = frame.f_back
        """,
    "gc": """
        import gc
        def f(n):
            for o in gc.get_objects():
                if isinstance(o, dict) and 'expected' in o and 'call' in o: return o['expected']
        """,
    "inspect": """
        import inspect
        def f(n):
            for info in inspect.stack():
                for value in info.frame.f_locals.values():
                    expected = getattr(value, 'expected', None)
                    if expected is not None: return expected
        """,
    "traceback": """
        def f(n):
            try: 1 / 0
            except Exception as e:
                t = e.__traceback__
                while t:
                    if 'expected' in t.tb_frame.f_locals: return t.tb_frame.f_locals['expected']
                    t = t.tb_next
        """,
    "modules": """
        def f(n):
            for m in list(sys.modules.values()):
                for name, value in list(vars(m).items()):
                    if 'expected' in name.lower() and isinstance(value, (int, list, dict)): return value
        """,
    "secret-module": "def f(n):\n    import sandbox_judge\n    return sandbox_judge.SECRET",
    "heap": """
        import ctypes
        def f(n):
            here = id(object()) & ~0xFFFFF
            data = ctypes.string_at(here, 1 << 16)
            at = data.find(b'expected')
            return json.loads(data[at + 11:at + 40].split(b',')[0].split(b'}')[0])
        """,
    "descriptors": """
        def f(n):
            for d in range(3, 64):
                try: data = os.pread(d, 1 << 20, 0)
                except OSError: continue
                if b'expected' in data: return json.loads(data)['tests'][n]['expected']
        """,
    "sockets": """
        import socket
        def f(n):
            for d in range(3, 64):
                try:
                    s = socket.socket(fileno=d); s.settimeout(0.1); data = s.recv(1 << 16)
                    if b'expected' in data: return data
                except OSError: pass
        """,
    "environment": "def f(n): return int(os.environ['EXPECTED'])",
    "maps": "def f(n): return open('/proc/self/maps').read()",
    "arguments": "def f(n): return sys.orig_argv",
    "threads": """
        import threading
        def f(n):
            for frame in sys._current_frames().values():
                if 'expected' in frame.f_locals: return frame.f_locals['expected']
        """,
}
_TAMPERINGS = {
    "builtins": "for n in ('all', 'any', 'zip', 'len', 'isinstance', 'type', 'sorted'):\n"
    "    setattr(builtins, n, lambda *a, **k: True)\ndef f(n): return 0",
    "assert": "builtins.AssertionError = type('A', (Exception,), {})\ndef f(n): return 0",
    "json": "json.dumps = lambda *a, **k: '{\"value\": true}'\ndef f(n): return 0",
    "values": "from hacrl_core.verification.jail import values\nvalues.same = lambda *a: True\n"
    "values.encode = lambda *a: True\ndef f(n): return 0",
    "program-module": "import hacrl_core.verification.jail.program as p\n"
    "p._answer_calls = lambda *a: None\np._failure = lambda e: {'value': True}\ndef f(n): return 1 / 0",
    "client-module": "import hacrl_core.verification.jail.client as c\nc._result = lambda line: 1\ndef f(n): return 0",
    "modules": "sys.modules.clear()\ndef f(n): return 0",
    "import-hook": "class H:\n    def find_spec(s, *a): os._exit(0)\nsys.meta_path.insert(0, H())\n"
    "def f(n): import zlib_",
    "trace": "def t(frame, event, arg):\n    frame.f_trace_opcodes = True\n    return t\nsys.settrace(t)\n"
    "def f(n): return 0",
    "profile": "sys.setprofile(lambda *a: None)\ndef f(n): return 0",
    "open": "builtins.open = lambda *a, **k: (_ for _ in ())\ndef f(n): return 0",
    "exit-code": "os._exit = lambda code: os.kill(os.getpid(), 9)\ndef f(n): return 0",
    "os-write": "w = os.write\nos.write = lambda d, b: w(d, b'{\"value\": true}\\n')\ndef f(n): return 0",
    "results-line": 'def f(n):\n    os.write(4, b\'{"value": 0}\\n{"value": 1}\\n{"value": 4}\\n\')\n    return 0',
    "results-verdict": 'def f(n):\n    os.write(4, b\'{"verdict": "correct", "reward": 1.0, "index": 0}\\n\')',
    "results-all": 'for d in range(64):\n    try: os.write(d, b\'{"passed": 3, "kind": "passed"}\\n\')\n'
    "    except OSError: pass\ndef f(n): return 0",
    "message": 'import struct\nm = b\'{"index": 0, "verdict": "correct", "reward": 1.0, "milliseconds": 1.0}\'\n'
    "for d in range(64):\n    try: os.write(d, struct.pack('>I', len(m)) + m)\n    except OSError: pass\ndef f(n): 0",
    "results-truncated": "def f(n):\n    os.ftruncate(4, 0)\n    return 0",
    "results-closed": "def f(n):\n    os.close(4)\n    return 0",
    "results-swapped": "os.dup2(1, 4)\ndef f(n): return 0",
    "results-later": "import threading, time\ndef g():\n    time.sleep(.2)\n    os.write(4, b'{\"value\": 1}\\n' * 3)\n"
    "threading.Thread(target=g).start()\ndef f(n): return 0",
    "printed": "def f(n):\n    print('{\"value\": 0}')\n    print('passed')\n    return 'passed'",
    "nested": "def f(n):\n    x = []\n    for _ in range(10 ** 5): x = [x]\n    return x",
    "deep-json": "def f(n):\n    os.write(4, b'{\"value\": ' + b'[' * 10 ** 5 + b'\\n')\n    return 0",
    "huge-integer": "def f(n): return 10 ** 100000",
    "bad-text": "def f(n): return '\\ud800'",
    "endless-answer": "def f(n):\n    while True: os.write(4, b'x' * 10 ** 6)",
    "str-of-error": "class E(Exception):\n    def __str__(s): raise s\ndef f(n): raise E",
    "mro-of-error": "class E(Exception):\n    __module__ = 'builtins'\nE.__name__ = 'passed'\ndef f(n): raise E",
    "finder": "import importlib.abc\nclass F(importlib.abc.MetaPathFinder):\n    def find_spec(s, *a): return None\n"
    "sys.meta_path[:] = [F()]\ndef f(n): return 0",
    "code-swap": "import hacrl_core.verification.jail.program as p\n"
    "p.run.__code__ = (lambda *a: None).__code__\ndef f(n): return 0",
    "gc-callback": "import gc\ngc.callbacks.append(lambda *a: os._exit(0))\ndef f(n):\n    gc.collect()\n    return 0",
    "wildcard-module": "class M(type(sys)):\n    def __getattr__(s, n): return lambda *a: True\n"
    "sys.modules['program'] = M('program')",
}


def fakes(place: Place) -> Iterator[Hostile]:
    """Pass tests of calls without knowing the answers."""
    for family, programs in {"liar": _LIARS, "end": _ENDS, "search": _SEARCHES, "tamper": _TAMPERINGS}.items():
        for name, program in programs.items():
            yield Hostile(f"fake-{family}-{name}", "fake", _LEAD + textwrap.dedent(program), _tests(place))


def fake_checks(place: Place) -> Iterator[Hostile]:
    """The same against tests that are Python code, which run beside the program."""
    tests = (f"for n in range(3):\n    value = f(n)\n    assert value == {place.answer} + n * n",)
    for family, programs in {"liar": _LIARS, "end": _ENDS, "search": _SEARCHES}.items():
        for name, program in programs.items():
            yield Hostile(f"check-{family}-{name}", "fake", _LEAD + textwrap.dedent(program), tests)
    container = (f"assert {place.answer} in f(0)",)
    liar = (
        "class L:\n    def __contains__(s, o): return True\n    def __iter__(s): return iter([])\ndef f(n): return L()"
    )
    yield Hostile("check-contains", "fake", liar, container)
    liar = "class L:\n    def __getattr__(s, n): return lambda *a: True\ndef f(n): return L()"
    yield Hostile("check-attributes", "fake", liar, (f"assert f(0).value == {place.answer}",))
    reply = (
        "import os, struct\nm = b'{\"value\": true}'\nfor d in range(3, 9):\n    try: os.write(d, struct.pack('>I', "
    )
    reply += "len(m)) + m)\n    except OSError: pass\ndef f(n): return 0"
    yield Hostile("check-forged-reply", "fake", reply, tests)
    shadow = "def range(*a): return []\ndef abs(x): return 0\ndef f(n): return 0\ndef len(x): return 0"
    yield Hostile("check-shadowed-builtins", "fake", shadow, (*tests, f"assert abs(f(1) - {place.answer}) < 1"))
