"""Where a model's code runs: a process that can compute, answer calls with plain data, and nothing else.

`parent.py` starts it and listens, `child.py` is what it runs; `namespaces.py` and `seccomp.py` are what confines it, and
`plain.py` is all that the two say to each other. Only the standard library is imported here: the child has no other.

Why not bubblewrap: its filter must let an interpreter start, with `execve` and the files of Python, and it is refused
wherever unprivileged namespaces are (Ubuntu 24.04, Docker). This child starts first and then gives everything up, so its
filter can be an allow-list of a dozen calls, which also holds where namespaces are refused; they come on top.
"""
