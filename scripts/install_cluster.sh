#!/usr/bin/env bash
# Installs what the tests of `make test-cluster` need on their hosts, which are namespaces: an SSH server, ip, nft.
# The SSH server of this machine is neither started nor configured. SwiftShader becomes the second of two unlike devices.
set -euo pipefail
cd "$(dirname "$0")/.."

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

packages=()
need() { command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || packages+=("$2"); }
need sshd openssh-server
need ssh openssh-client
need ip iproute2
need ss iproute2
need nft nftables
need nsenter util-linux

if [ ${#packages[@]} -gt 0 ]; then
  # Debian's package starts the server as it is installed, unless this says no.
  policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
    as_root chmod 755 "$policy"
    trap 'as_root rm -f "$policy"' EXIT
  fi
  as_root apt-get update -q
  DEBIAN_FRONTEND=noninteractive as_root apt-get install -y -q --no-install-recommends "${packages[@]}"
  # Nor is it to start with the machine: a server that was here before is left as it is.
  case " ${packages[*]} " in *' openssh-server '*) as_root systemctl disable -q ssh.service ssh.socket 2>/dev/null || true ;; esac
fi
scripts/install_vulkan.sh --swiftshader .drivers
