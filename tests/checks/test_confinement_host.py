"""Attacks on the host by a model's answers: each is judged by its effect on what is attacked."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.processes.confinement import TRY, UNGUARDED, confined, nothing_left, returned

from wgpu_lora.train.checks.code_check import run_check
from wgpu_lora.train.checks.sandbox import sandbox_process

pytestmark = confined


@pytest.fixture(autouse=True)
def all_is_as_before() -> Iterator[None]:
    with nothing_left():
        yield


SECRET = "1f6c-a-secret-of-the-host"


@pytest.fixture(autouse=True)
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_process, "ENTRY", UNGUARDED)


def test_no_process_can_be_hurt_or_read() -> None:
    """A bystander of the same user stands for the parent."""
    code = TRY + textwrap.dedent("""
        import signal
        def attack(pid, parent):
            word = ctypes.create_string_buffer(64)
            vector = (ctypes.c_ulong * 2)(ctypes.addressof(word), 8)
            targets = {"bystander": pid, "parent": parent, "all": -1, "group": 0, "init": 1}
            attempts = {}
            for name, at in targets.items():
                attempts |= {
                    f"kill_{name}": lambda at=at: os.kill(at, 9),
                    f"killpg_{name}": lambda at=at: os.killpg(abs(at), 9),
                    f"stop_{name}": lambda at=at: os.kill(at, signal.SIGSTOP),
                    f"pidfd_{name}": lambda at=at: signal.pidfd_send_signal(os.pidfd_open(at), 9),
                    f"pidfd_raw_{name}": lambda at=at: sys_(424, sys_(434, at, 0), 9, None, 0),
                    f"ptrace_{name}": lambda at=at: sys_(101, 16, at, None, None),
                    f"readv_{name}": lambda at=at: sys_(310, at, vector, 1, vector, 1, 0),
                    f"writev_{name}": lambda at=at: sys_(311, at, vector, 1, vector, 1, 0),
                    f"mem_{name}": lambda at=at: open(f"/proc/{at}/mem", "r+b"),
                    f"environ_{name}": lambda at=at: open(f"/proc/{at}/environ").read(),
                    f"nice_{name}": lambda at=at: os.setpriority(os.PRIO_PROCESS, at, 19),
                    f"limit_{name}": lambda at=at: sys_(302, at, 7, vector, None),
                    f"affinity_{name}": lambda at=at: os.sched_setaffinity(at, [0]),
                }
            # rt_sigqueueinfo, tkill, tgkill, process_madvise, pidfd_getfd, kcmp
            attempts |= {f"raw_{n}": lambda n=n: sys_(n, pid, 9, 9, 9) for n in (129, 200, 234, 440, 438, 312)}
            return tried(**attempts)
        """)
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        assert returned(code, bystander.pid, os.getpid()) == {}
        assert bystander.poll() is None
        assert psutil.Process(bystander.pid).status() == psutil.STATUS_SLEEPING
        assert psutil.Process(bystander.pid).nice() == psutil.Process().nice()
    finally:
        bystander.kill()
        bystander.wait()


def test_no_file_of_the_host_can_be_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    code = TRY + textwrap.dedent("""
        import io
        def attack(path, folder):
            raw = path.encode()
            how = (ctypes.c_uint64 * 3)(0, 0, 0)
            return tried(
                open=lambda: open(path).read(), binary=lambda: open(path, "rb").read(),
                os_open=lambda: os.open(path, 0), open_code=lambda: io.open_code(path).read(),
                libc_open=lambda: os.read(libc.open(raw, 0), 99), openat=lambda: sys_(257, -100, raw, 0, 0),
                raw_open=lambda: sys_(2, raw, 0, 0), openat2=lambda: sys_(437, -100, raw, how, 24),
                handle=lambda: sys_(304, -100, raw, 0, 0), list=lambda: os.listdir(folder),
                scan=lambda: list(os.scandir(folder)), stat=lambda: os.stat(path),
                link=lambda: os.readlink("/proc/self/exe"),
                etc=lambda: open("/etc/passwd").read(), root=lambda: os.listdir("/"), proc=lambda: os.listdir("/proc"),
                maps=lambda: open("/proc/self/maps").read(), cwd=lambda: os.getcwd(), chdir=lambda: os.chdir(folder),
                dot=lambda: os.listdir(".."), descriptors=lambda: [os.fstat(fd) for fd in range(3, 100)],
                inherited=lambda: [os.pread(fd, 9, 0) for fd in range(3, 20)],
                library=lambda: ctypes.CDLL("libutil.so.1"),
                loader=lambda: ctypes.CDLL(path),
                importing=lambda: sys.path.append(folder) or __import__("attack_module"),
                uring=lambda: sys_(425, 8, ctypes.create_string_buffer(200)), bpf=lambda: sys_(321, 0, raw, 72),
                perf=lambda: sys_(298, raw, 0, -1, -1, 0), fault=lambda: sys_(323, 0), keys=lambda: sys_(250, 0, -3, 0),
            )
        """)
    (tmp_path / "attack_module.py").write_text("")
    assert returned(code, str(secret), str(tmp_path)) == {}
    # By what an answer may write to as well: its input, output and errors.
    code = "import os\ndef attack():\n    return [os.write(2, b'x'), os.read(0, 99)]"
    assert returned(code) == [1, b""]


def test_nothing_can_be_written(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("as it was")
    code = TRY + textwrap.dedent("""
        def attack(folder):
            at = lambda name: os.path.join(folder, name)
            attempts = {}
            for place in (folder, "/tmp", "/dev/shm", "/", ".", "/var/tmp", "/run"):
                new = os.path.join(place, "attack")
                attempts |= {
                    f"write_{place}": lambda new=new: open(new, "w"), f"mkdir_{place}": lambda new=new: os.mkdir(new),
                    f"fifo_{place}": lambda new=new: os.mkfifo(new),
                    f"link_{place}": lambda new=new: os.symlink("a", new),
                    f"node_{place}": lambda new=new: os.mknod(new),
                    f"temp_{place}": lambda place=place: os.open(place, 0x410002),
                }
            there = at("there")
            return tried(
                append=lambda: open(there, "a"), truncate=lambda: os.truncate(there, 0),
                remove=lambda: os.remove(there),
                rename=lambda: os.rename(there, at("attack")), chmod=lambda: os.chmod(there, 0o777),
                chown=lambda: os.chown(there, 1, 1), utime=lambda: os.utime(there),
                hard=lambda: os.link(there, at("attack")),
                memory=lambda: os.memfd_create("attack"), shm=lambda: sys_(29, 1, 4096, 0o1666),
                queue=lambda: sys_(240, b"attack", 66, 438, 0),
                mount=lambda: sys_(165, b"a", b"/", b"tmpfs", 0, 0), chroot=lambda: os.chroot("/"),
                unshare=lambda: sys_(272, 0x10000000),
                setns=lambda: sys_(308, 0, 0), reboot=lambda: sys_(169, 1, 2, 3), module=lambda: sys_(175, b"", 0, b""),
                hostname=lambda: sys_(170, b"attack", 6), clock=lambda: sys_(227, 0, ctypes.create_string_buffer(16)),
                root=lambda: os.setuid(0), dumpable=lambda: sys_(157, 4, 1), privileges=lambda: sys_(157, 38, 0),
                pipe=lambda: os.pipe(),
                dup=lambda: os.dup(1), close=lambda: os.close(1),
                limits=lambda: sys_(160, 9, (ctypes.c_ulong * 2)(2**63, 2**63)), **attempts,
            )
        """)
    assert returned(code, str(tmp_path)) == {}
    assert there.read_text() == "as it was"
    assert os.listdir(tmp_path) == ["there"]


def test_no_socket_of_any_family(tmp_path: Path) -> None:
    code = TRY + textwrap.dedent("""
        def attack(port, path):
            open_ = []
            for family in range(0, 64):
                for kind in (1, 2, 3, 4, 5, 6, 10):
                    for call in (libc.socket, libc.socketpair):
                        if call(family, kind, 0, (ctypes.c_int * 2)()) != -1:
                            open_.append((family, kind))
            for fd in (0, 1, 2):
                address = (2).to_bytes(2, "little") + port.to_bytes(2, "big") + bytes([127, 0, 0, 1]) + bytes(8)
                for address in (address, b"\\1\\0" + path.encode() + b"\\0", b"\\1\\0\\0attack"):
                    for call in (libc.connect, libc.bind):
                        if call(fd, address, len(address)) != -1:
                            open_.append((fd, address))
                if libc.sendto(fd, b"x", 1, 0, address, len(address)) != -1 or libc.listen(fd, 1) != -1:
                    open_.append(fd)
            return open_
        """)
    inet, unix, abstract = socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with inet, unix, abstract:
        inet.bind(("127.0.0.1", 0))
        unix.bind(str(tmp_path / "u"))
        abstract.bind(f"\0attack-{os.getpid()}")
        for listener in (inet, unix, abstract):
            listener.listen()
            listener.setblocking(False)
        assert returned(code, inet.getsockname()[1], str(tmp_path / "u")) == []
        for module in (
            "import socket\n    socket.create_connection(('127.0.0.1', {}))",
            "import _socket; _socket.socket()",
        ):
            result = run_check(f"def f():\n    {module.format(inet.getsockname()[1])}\n    return 1", "assert f() == 1")
            assert not result.passed
        for listener in (inet, unix, abstract):
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_no_program_process_or_thread_is_started(tmp_path: Path) -> None:
    code = TRY + textwrap.dedent("""
        import _thread, threading
        def attack(marker):
            script = ["/bin/sh", "-c", f"touch {marker}"]
            raw = [word.encode() for word in script]
            words = (ctypes.c_char_p * 4)(*raw, None)
            def fork_exec():
                import _posixsubprocess
                return _posixsubprocess.fork_exec(
                    raw, raw[:1], True, (), None, None, *[-1] * 8, False, False, 0, None, None, None, -1, None, True)
            def bomb():
                while True:
                    os.fork()
            return tried(
                system=lambda: 1 / (os.system(script[2]) == 0), popen=lambda: os.popen(script[2]).read() and None,
                fork=lambda: os.fork(), bomb=bomb, pty=lambda: os.forkpty(),
                spawn=lambda: os.posix_spawn(script[0], script, {}),
                fork_exec=fork_exec, execv=lambda: os.execv(script[0], script),
                libc_execv=lambda: 1 / (1 + libc.execv(raw[0], words)),
                libc_system=lambda: 1 / (libc.system(raw[2]) == 0), vfork=lambda: sys_(58), raw_fork=lambda: sys_(57),
                clone=lambda: sys_(56, 17, 0, 0, 0, 0), clone3=lambda: sys_(435, (ctypes.c_uint64 * 11)(), 88),
                execve=lambda: sys_(59, raw[0], words, None), execveat=lambda: sys_(322, -100, raw[0], words, None, 0),
                fexecve=lambda: sys_(322, 0, b"", words, None, 0x1000), session=lambda: os.setsid(),
                group=lambda: os.setpgid(0, 0),
                thread=lambda: _thread.start_new_thread(print, ()),
                threading=lambda: threading.Thread(target=print).start(),
                timer=lambda: threading.Timer(0, print).start(),
            )
        """)
    assert returned(code, str(tmp_path / "marker")) == {}
    assert not (tmp_path / "marker").exists()


def test_nothing_of_the_parent_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTACK", SECRET)
    read, write = os.pipe()
    os.set_inheritable(write, True)
    code = TRY + textwrap.dedent("""
        import gc
        def attack(write):
            environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
            raw = [environ[0]] if environ else []
            written = tried(write=lambda: os.write(write, b"x"))
            return dict(os.environ), raw, written, sys.argv
        """)
    try:
        environ, raw, files, argv = returned(code, write)
    finally:
        os.close(read)
        os.close(write)
    assert (environ, raw, files, argv) == ({}, [None], {}, [""])


def test_it_ends_with_its_parent() -> None:
    """The parent is killed while the answer runs."""
    answer = "def f():\n    while True: pass"
    code = f"from wgpu_lora.train.checks.code_check import run_check\nrun_check({answer!r}, 'assert f() == 1', 99.0)"
    helper = subprocess.Popen([sys.executable, "-c", code])
    try:
        children: list[psutil.Process] = []
        deadline = time.monotonic() + 20
        while not any(child.cpu_times().user > 0.2 for child in children):
            assert time.monotonic() < deadline
            children = psutil.Process(helper.pid).children(recursive=True)
        assert len(children) in (1, 2)  # with a PID namespace there is one that waits
    finally:
        helper.kill()
        helper.wait()
    assert psutil.wait_procs(children, 5.0)[1] == []
