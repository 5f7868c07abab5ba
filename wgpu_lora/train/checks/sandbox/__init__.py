"""A confined process for code written by a model, which can only compute and answer calls with plain data.

`sandbox_process.py` starts it and reads its results, `sandbox_child.py` runs in it; `linux_sandbox.py` and
`wgpu_lora/processes/seccomp.py` confine it, and `plain_data.py` encodes all data between the two. The child imports
the standard library alone.

Why not bubblewrap: it has to start an interpreter, so its filter must allow `execve` and its root must contain Python's
files; and it does not work where unprivileged namespaces are refused (Ubuntu 24.04, Docker). This child starts first
and then gives up all access, so its filter can be an allow-list of 19 calls (18 on arm64) and its root can be empty;
and the filter also works where namespaces are refused.
"""
