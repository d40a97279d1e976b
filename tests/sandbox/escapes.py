"""Programs that print ESCAPED when what they tried worked."""

import textwrap
from collections.abc import Iterator

from tests.sandbox.cases import Hostile, Place


def _escape(name: str, body: str, *, outside: bool = True) -> Hostile:
    """A program that prints ESCAPED if its body runs through without an exception."""
    program = f"import os, sys\ntry:\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n    print('ESCAPED')\n"
    program += "except BaseException as e:\n    print(type(e).__name__)\n"
    return Hostile(name, "escape", program, ({"input": "", "output": "ESCAPED"},), works_outside=outside)


def reads(place: Place) -> Iterator[Hostile]:
    """Read what is none of a program's business, by many roads."""
    ways = {
        "open": "assert open({path!r}, 'rb').read(1)",
        "os": "assert os.read(os.open({path!r}, os.O_RDONLY), 1)",
        "mmap": "import mmap; f = open({path!r}, 'rb'); assert mmap.mmap(f.fileno(), 0, prot=1)[:1]",
        "ctypes": "import ctypes; assert ctypes.CDLL(None).open({path!r}.encode(), 0) >= 0",
        "pathlib": "import pathlib; assert pathlib.Path({path!r}).read_bytes()",
        "loader": "import importlib.util as u; s = u.spec_from_loader('x', None); "
        "from importlib.machinery import SourceFileLoader as L; assert L('x', {path!r}).get_data({path!r})",
        "linecache": "import linecache; assert linecache.getlines({path!r})",
        "dotdot": "assert open('/usr/lib/../..' + {path!r}, 'rb').read(1)",
    }
    files = {"secret": place.secret_file, "store": f"{place.store}/objects/secret", "passwd": "/etc/passwd"}
    files["sources"] = f"{place.sources}/README.md"
    for file, path in files.items():
        for way, body in ways.items():
            yield _escape(f"read-{file}-{way}", body.format(path=path))
    for number, path in enumerate(
        ["/proc/self/environ", "/proc/self/maps", "/proc/self/status", "/proc/1/cmdline", "/proc/self/cmdline"]
    ):
        yield _escape(f"read-proc-{number}", f"assert open({path!r}, 'rb').read(1)")
    yield _escape("read-proc-mem", "f = open('/proc/self/mem', 'rb'); f.seek(id(f)); assert f.read(1)")
    yield _escape("read-parent-maps", "assert open(f'/proc/{os.getppid()}/maps', 'rb').read(1)")
    yield _escape("read-runner-environ", f"assert open('/proc/{place.runner}/environ', 'rb').read(1)")
    yield _escape("read-parent-fd", "assert os.listdir(f'/proc/{os.getppid()}/fd')")
    for name, path in {"home": place.home, "root": "/", "etc": "/etc", "proc": "/proc", "folder": place.folder}.items():
        yield _escape(f"list-{name}", f"assert os.listdir({path!r})")
        yield _escape(f"scan-{name}", f"import glob; assert glob.glob({path!r} + '/*')")
    yield _escape("environment-home", f"assert os.environ['HOME'] == {place.home!r}", outside=False)
    yield _escape("environment-path", f"assert {place.sources!r} in str(dict(os.environ))", outside=False)
    yield _escape("import-hacrl", "import hacrl_core.verification.code, hacrl_core.seeding", outside=False)
    yield _escape("read-shadow", "assert open('/etc/shadow').read(1)", outside=False)
    yield _escape("read-kernel-log", "assert open('/dev/kmsg', 'rb', buffering=0).read(1)", outside=False)
    yield _escape("read-disk", "import glob; assert open(glob.glob('/dev/*da')[0], 'rb').read(1)", outside=False)
    yield _escape("read-memory-device", "assert open('/dev/mem', 'rb').read(1)", outside=False)


def writes(place: Place) -> Iterator[Hostile]:
    """Leave something behind, anywhere."""
    for name, folder in {"folder": place.folder, "tmp": "/tmp", "store": place.store}.items():
        path = f"{folder}/left-by-a-program"
        yield _escape(f"write-{name}", f"open({path!r}, 'w').write('x')")
        yield _escape(f"write-os-{name}", f"os.close(os.open({path!r}, os.O_CREAT | os.O_RDWR))")
        yield _escape(f"mkdir-{name}", f"os.mkdir({path!r} + '-dir' + str(os.getpid()))")
        yield _escape(f"symlink-{name}", f"os.symlink('/etc', {path!r} + '-link' + str(os.getpid()))")
        yield _escape(f"mkfifo-{name}", f"os.mkfifo({path!r} + '-fifo' + str(os.getpid()))")
    secret = place.secret_file
    yield _escape("append-secret", f"open({secret!r}, 'a').write('x')")
    yield _escape("chmod-secret", f"os.chmod({secret!r}, 0o644)")
    yield _escape("utime-secret", f"os.utime({secret!r})")
    yield _escape("hardlink-secret", f"os.link({secret!r}, '/tmp/hard-' + str(os.getpid()))")
    yield _escape("symlink-and-read", f"os.symlink({secret!r}, '/tmp/l'); assert open('/tmp/l').read()", outside=False)
    yield _escape("rename-over-secret", f"os.rename('/etc/hostname', {secret!r})", outside=False)
    yield _escape("unlink-secret", f"os.unlink({secret!r})", outside=False)
    yield _escape("truncate-secret", f"os.truncate({secret!r}, 0)", outside=False)
    yield _escape("rmtree-store", f"import shutil; shutil.rmtree({place.store!r})", outside=False)
    yield _escape("copy-secret", f"import shutil; shutil.copy({secret!r}, '/tmp/copy-of-secret')")
    yield _escape("tempfile", "import tempfile; tempfile.NamedTemporaryFile()")
    yield _escape("shared-memory", "open('/dev/shm/x-' + str(os.getpid()), 'w').write('x')")
    yield _escape("poison-module", "import json; open(json.__file__, 'a').write('#')", outside=False)
    yield _escape("poison-site", "import site; open(site.getsitepackages()[0] + '/x.pth', 'w')", outside=False)
    yield _escape("poison-cache", "import json; open(json.__cached__, 'ab').write(b'')", outside=False)
    yield _escape("memory-file", "os.memfd_create('x')")
    yield _escape("mknod", "os.mknod('/tmp/device', 0o20666, os.makedev(1, 1))", outside=False)
    yield _escape("chroot", "os.chroot('/tmp')", outside=False)


def network(place: Place) -> Iterator[Hostile]:
    """Speak to anybody."""
    port = place.port
    yield _escape("tcp", f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
    yield _escape("tcp-name", f"import socket; socket.create_connection(('localhost', {port}), 2)")
    yield _escape("tcp-asyncio", f"import asyncio; asyncio.run(asyncio.open_connection('127.0.0.1', {port}))")
    yield _escape("udp", f"import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', {port}))")
    yield _escape("tcp6", "import socket; socket.socket(socket.AF_INET6)", outside=False)
    yield _escape("bind", "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()")
    yield _escape("unix", f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({place.socket_path!r})")
    yield _escape("unix-abstract", "import socket; s = socket.socket(1); s.bind('\\0x' + str(os.getpid()))")
    yield _escape("netlink", "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)")
    yield _escape("raw", "import socket; socket.socket(2, 3, 1)", outside=False)
    yield _escape("packet", "import socket; socket.socket(17, 3)", outside=False)
    yield _escape("vsock", "import socket; socket.socket(40, 1)", outside=False)
    yield _escape("dns", "import socket; socket.getaddrinfo('example.com', 80)", outside=False)
    yield _escape("urllib", "import urllib.request; urllib.request.urlopen('http://1.1.1.1', timeout=2)", outside=False)
    yield _escape("ctypes-socket", "import ctypes; assert ctypes.CDLL(None).socket(2, 1, 0) >= 0")
    yield _escape("smtp", f"import smtplib; smtplib.SMTP('127.0.0.1', {port}, timeout=1)", outside=False)
    yield _escape("http-server", "import http.server as h; h.HTTPServer(('127.0.0.1', 0), h.BaseHTTPRequestHandler)")


def processes(place: Place) -> Iterator[Hostile]:
    """Start anything that could outlive the program."""
    yield _escape("fork", "p = os.fork()\nif p == 0: os._exit(0)")
    yield _escape("double-fork", "p = os.fork()\nif p == 0:\n    os.setsid(); os.fork(); os._exit(0)")
    yield _escape("system", "assert os.system('true') == 0")
    yield _escape("popen", "assert os.popen('echo x').read()")
    yield _escape("subprocess", "import subprocess; subprocess.run(['true'], check=True)")
    yield _escape("spawn", "os.posix_spawn('/bin/true', ['true'], {})")
    yield _escape("exec", "os.execv('/bin/echo', ['echo', 'ESCAPED'])")
    yield _escape("exec-python", "os.execv(sys.executable, [sys.executable, '-c', 'print(\"ESCAPED\")'])")
    yield _escape("multiprocessing", "import multiprocessing as m; p = m.Process(target=print); p.start(); p.join(); "
                  "assert p.exitcode == 0")  # fmt: skip
    yield _escape("process-pool", "from concurrent.futures import ProcessPoolExecutor as P\n"
                  "with P(1) as p: assert p.submit(abs, -1).result(2) == 1")  # fmt: skip
    yield _escape("pty", "import pty; p, f = pty.fork()\nif p == 0: os._exit(0)", outside=False)
    yield _escape("ctypes-fork", "import ctypes; p = ctypes.CDLL(None).fork()\nif p == 0: os._exit(0)\nassert p > 0")
    yield _escape("raw-clone", "import ctypes; p = ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0)\n"
                  "if p == 0: os._exit(0)\nassert p > 0")  # fmt: skip
    yield _escape("raw-vfork", "import ctypes; p = ctypes.CDLL(None).syscall(57)\nif p == 0: os._exit(0)\nassert p > 0")
    yield _escape("clone-user-namespace", "import ctypes; p = ctypes.CDLL(None).syscall(56, 0x10000011, 0, 0, 0, 0)\n"
                  "if p == 0: os._exit(0)\nassert p > 0", outside=False)  # fmt: skip
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    yield Hostile("fork-bomb", "hog", bomb, ({"input": "", "output": "x"},), slow=True)
    bomb = "import subprocess\nwhile True:\n    try: subprocess.Popen(['sleep', '1000'])\n    except Exception: pass\n"
    yield Hostile("process-bomb", "hog", bomb, ({"input": "", "output": "x"},), slow=True)


def signals(place: Place) -> Iterator[Hostile]:
    """Reach other processes: the parent, the worker, process 1, the machine's."""
    targets = {"parent": "os.getppid()", "init": "1", "worker": "2", "zygote": "3", "victim": str(place.victim)}
    for name, target in targets.items():
        yield _escape(f"ask-{name}", f"os.kill({target}, 0)", outside=name == "victim")
        yield _escape(f"kill-{name}", f"os.kill({target}, 9)", outside=False)
        yield _escape(f"stop-{name}", f"os.kill({target}, 19)", outside=False)
    yield _escape("kill-everything", "os.kill(-1, 9)", outside=False)
    yield _escape("kill-group", "os.killpg(0, 15)", outside=False)
    yield _escape("kill-parent-group", "os.killpg(os.getpgid(os.getppid()), 9)", outside=False)
    yield _escape("pidfd", "f = os.pidfd_open(os.getppid()); import signal; signal.pidfd_send_signal(f, 0)")
    yield _escape("tgkill", "import ctypes; p = os.getppid(); assert ctypes.CDLL(None).syscall(234, p, p, 0) == 0")
    yield _escape("tkill", "import ctypes; assert ctypes.CDLL(None).syscall(200, os.getppid(), 0) == 0")
    yield _escape("setown", "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())")
    yield _escape("renice", "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)", outside=False)
    yield _escape("limit-parent", "import resource as r; r.prlimit(os.getppid(), r.RLIMIT_CPU, (1, 1))", outside=False)
    yield _escape("affinity-parent", "os.sched_setaffinity(os.getppid(), {0})", outside=False)
    yield _escape("scheduler-parent", "os.sched_setscheduler(os.getppid(), 3, os.sched_param(0))", outside=False)


_CALLS = {
    "ptrace-attach": "101, 16, os.getppid(), 0, 0",
    "ptrace-traceme": "101, 0, 0, 0, 0",
    "process-vm-readv": "310, os.getppid(), 0, 0, 0, 0, 0",
    "process-vm-writev": "311, os.getppid(), 0, 0, 0, 0, 0",
    "mount": "165, b'none', b'/tmp', b'tmpfs', 0, 0",
    "umount": "166, b'/tmp', 2",
    "unshare-user": "272, 0x10000000",
    "unshare-mounts": "272, 0x20000",
    "unshare-network": "272, 0x40000000",
    "setns": "308, 0, 0",
    "pivot-root": "155, b'/', b'/'",
    "chroot-call": "161, b'/'",
    "fsopen": "430, b'tmpfs', 0",
    "open-tree": "428, -100, b'/', 1",
    "bpf": "321, 0, 0, 0",
    "perf": "298, 0, 0, -1, -1, 0",
    "keyctl": "250, 0, -3, 1",
    "add-key": "248, b'user', b'x', b'y', 1, -3",
    "io-uring": "425, 1, b' ' * 120",
    "userfaultfd": "323, 1",
    "sethostname": "170, b'x', 1",
    "settimeofday": "164, 0, 0",
    "adjtimex": "159, b' ' * 208",
    "personality": "135, 0x0040000",
    "name-to-handle": "303, -100, b'/', b' ' * 200, b' ' * 8, 0",
    "open-by-handle": "304, -100, b' ' * 200, 0",
    "pidfd-open": "434, os.getppid(), 0",
    "pidfd-getfd": "438, 0, 0, 0",
    "setuid": "105, 0",
    "setresuid": "117, 0, 0, 0",
    "setgid": "106, 0",
    "setgroups": "116, 0, 0",
    "capset": "126, b' ' * 8, b' ' * 24",
    "dumpable": "157, 4, 1, 0, 0, 0",
    "no-death-signal": "157, 1, 0, 0, 0, 0",
    "subreaper": "157, 36, 1, 0, 0, 0",
    "landlock": "444, 0, 0, 1",
    "seccomp": "317, 2, 0, b' ' * 8",
    "kexec": "246, 0, 0, 0, 0",
    "init-module": "175, b'x', 1, b''",
    "swapon": "167, b'/tmp', 0",
    "acct": "163, 0",
    "iopl": "172, 3",
    "ioperm": "173, 0, 1, 1",
    "syslog": "103, 10, 0, 0",
    "quotactl": "179, 0, 0, 0, 0",
    "fanotify": "300, 0, 0",
    "inotify": "294, 0",
    "shmget": "29, 0, 4096, 0o1666",
    "msgget": "68, 0, 0o1666",
    "semget": "64, 0, 1, 0o1666",
    "mq-open": "240, b'x', 0o102, 0o666, 0",
    "vhangup": "153",
    "kcmp": "312, os.getppid(), os.getpid(), 0, 0, 0",
    "modify-ldt": "154, 0, b' ' * 16, 16",
    "execveat": "322, -100, b'/bin/true', 0, 0, 0",
    "x32": "0x40000000 + 39",
    "clone3": "435, b' ' * 88, 88",
    "memfd-secret": "447, 0",
    "setsid": "112",
    "setpgid": "109, 0, 0",
    "rseq-of-others": "302, os.getppid(), 7, 0, 0",
}


def system_calls(place: Place) -> Iterator[Hostile]:
    """Make system calls directly that no program needs."""
    for name, arguments in _CALLS.items():
        body = f"import ctypes; assert ctypes.CDLL(None).syscall({arguments}) >= 0"
        yield _escape(f"call-{name}", body, outside=False)
