"""Options of tasks as this host has their paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wgpu_lora.cluster.node.layout import Layout
from wgpu_lora.cluster.node.publishing import allowed_roots, refused_path
from wgpu_lora.cluster.spec.paths import HERE, is_hub_id, node_paths, on_node, sent_name
from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import flag


def options_here(options: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Options with the paths of this host.

    Raises:
        UserError: a path is outside the folders that jobs may read here, or begins with `~`.
    """
    there, roots = on_node(options, node_paths(), layout.sent), allowed_roots()
    for name in HERE:
        value = there.get(name)
        if not isinstance(value, str) or sent_name(str(options[name])):
            continue
        if value.startswith("~"):  # drivers say whole paths; whoever opens it would look into a home directory
            raise UserError(
                f"{flag(name)} {value} begins with '~', which each machine has elsewhere: give a whole path."
            )
        if roots and value != "demo" and not is_hub_id(value, ".") and (wrong := refused_path(value, roots)):
            raise UserError(f"{flag(name)} {value} {wrong}: use a path that this host allows.")
    return there


def parcels_of(options: Mapping[str, Any]) -> list[str]:
    """The digests of sent data that options name."""
    names = (sent_name(options[name]) for name in HERE if isinstance(options.get(name), str))
    return [found[0] for found in names if found]
