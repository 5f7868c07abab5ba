"""A host to Ray's launcher: its node provider and its command runner, which `ray up` and `ray down` load.

Ray's own runner turns the checks of host keys off, and its `ray stop` would end every Ray of that user on the host.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from ray.autoscaler.command_runner import CommandRunnerInterface
from ray.autoscaler.node_provider import NodeProvider

from wgpu_lora.cluster.cluster_file import HostSpec
from wgpu_lora.cluster.launcher.checks import ask
from wgpu_lora.cluster.launcher.files import write_private
from wgpu_lora.cluster.launcher.ssh import ssh
from wgpu_lora.errors import UserError

OF_RAYS_AUTOSCALER = "~/ray_bootstrap_config.yaml"  # it would replace that of another cluster of this user
STOP_SECONDS = 120.0


class HostRunner(CommandRunnerInterface):  # type: ignore[misc]
    """Runs what Ray's launcher asks for on a host."""

    def __init__(self, host: HostSpec) -> None:
        self.host = host

    def run(
        self,
        cmd: str | None = None,
        timeout: int = 120,
        exit_on_fail: bool = False,
        port_forward: Any = None,
        with_output: bool = False,
        environment_variables: dict[str, object] | None = None,
        run_env: str = "auto",
        ssh_options_override_ssh_key: str = "",
        shutdown_after_run: bool = False,
        silent: bool = False,
    ) -> str:
        """Runs a command; its output is printed, or returned. Raises CalledProcessError if it fails."""
        if not cmd or cmd == "ray stop":  # `terminate_node` ends this cluster's processes, and no others
            return ""
        exports = "".join(f"export {name}={shlex.quote(str(v))}; " for name, v in (environment_variables or {}).items())
        argv = [*ssh(self.host), "--", self.host.host, exports + cmd]
        kept = subprocess.PIPE if with_output else None
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=kept, text=True, check=True)
        sys.stdout.flush()
        return done.stdout or ""

    def run_rsync_up(self, source: str, target: str, options: dict[str, Any] | None = None) -> None:
        """Copies a file or a folder to the host, with its permissions."""
        if target != OF_RAYS_AUTOSCALER:
            self._rsync(source, f"{self.host.host}:{target}")

    def run_rsync_down(self, source: str, target: str, options: dict[str, Any] | None = None) -> None:
        """Copies a file or a folder from the host."""
        self._rsync(f"{self.host.host}:{source}", target)

    def _rsync(self, source: str, target: str) -> None:
        # rsync splits the command at spaces, and knows double quotes.
        shell = " ".join(f'"{word}"' if " " in word else word for word in ssh(self.host))
        subprocess.run(["rsync", "--archive", "--rsh", shell, "--", source, target], check=True,
                       stdin=subprocess.DEVNULL)  # fmt: skip

    def remote_shell_command_str(self) -> str:
        """The command that opens a shell there."""
        return shlex.join([*ssh(self.host), "--", self.host.host])


class HostProvider(NodeProvider):  # type: ignore[misc]
    """A cluster of the one host that its configuration names; the host's name is its node id."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self.host = HostSpec(**provider_config["host"])
        self._state = Path(provider_config["state"])

    def get_command_runner(self, *args: Any, **kwargs: Any) -> HostRunner:
        return HostRunner(self.host)

    def _tags(self) -> dict[str, str] | None:
        """Ray's tags of the host; None if it is not started."""
        try:
            found: dict[str, str] = json.loads(self._state.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        tags = self._tags()
        return [self.host.host] if tags is not None and tag_filters.items() <= tags.items() else []

    def nodes_for_teardown(self, tag_filters: dict[str, str]) -> list[str]:
        return self.non_terminated_nodes(tag_filters)

    def is_running(self, node_id: str) -> bool:
        return self._tags() is not None

    def is_terminated(self, node_id: str) -> bool:
        return self._tags() is None

    def node_tags(self, node_id: str) -> dict[str, str]:
        return self._tags() or {}

    def external_ip(self, node_id: str) -> str:
        return self.host.host

    def internal_ip(self, node_id: str) -> str:
        return self.host.host

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        write_private(self._state, json.dumps(tags))

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        write_private(self._state, json.dumps({**self.node_tags(node_id), **tags}))

    def terminate_node(self, node_id: str) -> None:
        """Ends all processes of the cluster on the host. Raises UserError if that cannot be done."""
        try:
            ask(self.host, self.provider_config["folder"], "stop", STOP_SECONDS)
        except UserError as error:
            print(json.dumps({"refused": str(error)}), flush=True)  # for `cluster down`, which reads what Ray prints
            raise
        self._state.unlink(missing_ok=True)

    def prepare_for_head_node(self, cluster_config: dict[str, Any]) -> dict[str, Any]:
        return {}
