#!/usr/bin/env bash
# root.sh make ROOT: a root of the newest Debian in ROOT, with Mesa's drivers and drm shims and the package's dependencies.
# root.sh run ROOT COMMAND...: runs a command there, with this checkout at /checkout. Both need root rights.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/../.." && pwd)
action=$1 root=$2
certificates=/etc/ssl/certs/ca-certificates.crt

fail() { echo "$*" >&2; exit 2; }

[ "$(id -u)" = 0 ] || fail "The compilers for this GPU run in a root of the newest Debian, which needs root rights: run this as root, or choose GPUs that need none (--gpu rdna1 --gpu rdna3)."

# Mounts are those of one process, and vanish with it.
inside() {
  mkdir -p "$root/checkout"
  unshare --mount --propagation private bash -c '
    mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && mount --bind -o ro "$2" "$1/checkout" &&
    cd / && exec chroot "$1" "${@:3}"' - "$root" "$checkout" "$@"
}

make_root() {
  local mirror dependencies
  if ! command -v debootstrap >/dev/null; then
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends debootstrap; } >&2 ||
      fail "debootstrap, which makes a root of the newest Debian, is missing and could not be installed: install it and run this again."
  fi
  mirror=$(grep -hsE '^URIs:' /etc/apt/sources.list.d/*.sources | grep -v security | awk '{print $2; exit}' || true)
  rm -rf --one-file-system "$root.new"
  debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates,mesa-vulkan-drivers,mesa-drm-shim,libvulkan1 \
    sid "$root.new" "${mirror:-http://deb.debian.org/debian}" >&2 ||
    fail "debootstrap could not make a root of the newest Debian in $root.new: its last lines above say why; check the network and run this again."
  cp /etc/resolv.conf "$root.new/etc/"
  [ ! -f "$certificates" ] || cp "$certificates" "$root.new$certificates" # behind a proxy, also the host's own
  root=$root.new
  dependencies=$(inside python3 -c 'import tomllib; print("\n".join(tomllib.load(open("/checkout/pyproject.toml", "rb"))["project"]["dependencies"]))')
  printf '%s\n' "$dependencies" >"$root/tmp/dependencies"
  inside bash -c "python3 -m venv /venv && PIP_CERT=$certificates /venv/bin/pip install -q --disable-pip-version-check -r /tmp/dependencies" >&2 ||
    fail "The package's dependencies could not be installed in $root: check the network and run this again."
  mv "$root" "${root%.new}"
}

case $action in
  make) [ -x "$root/venv/bin/python" ] || make_root ;;
  run) inside "${@:3}" ;;
  *) fail "root.sh make ROOT, or root.sh run ROOT COMMAND..." ;;
esac
