"""Where a model's code runs: a process that can compute, answer calls with plain data, and nothing else.

`parent.py` starts it and listens, `child.py` is what it runs; `namespaces.py` and `seccomp.py` confine it, and
`plain.py` is all that the two say to each other. Only the standard library is imported here: the child has no other.

Why not bubblewrap: what it runs still has to start an interpreter, so its filter must allow `execve` and its root must
have Python's files; and it is refused wherever unprivileged namespaces are (Ubuntu 24.04, Docker). This child starts
first and then gives everything up. So its filter can be an allow-list of 19 calls (18 on arm64), and its root can
be empty; and the filter holds where namespaces are refused, too.
"""
