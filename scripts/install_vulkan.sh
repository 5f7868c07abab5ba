#!/usr/bin/env bash
# Installs Mesa's software Vulkan driver, unless a Vulkan driver is already installed.
# --chromium also installs Chromium, which has WebGPU, for `make test-web`.
# --swiftshader DIR also unpacks SwiftShader into DIR, as a second, independent driver for `make test-drivers` and
# `make prove-wgpu`. --drm-shim DIR unpacks Mesa's drm shims into DIR, for `make gpu-compilers`.
set -euo pipefail

have_driver() {
  # Not piped into 'grep -q': it stops early, which would fail the pipe under pipefail.
  local libraries
  libraries=$(ldconfig -p 2>/dev/null)
  [[ $libraries == *libvulkan.so.1* ]] || return 1
  [ -n "${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}}" ] && return 0
  local folder
  for folder in /usr/share/vulkan/icd.d /etc/vulkan/icd.d /usr/local/share/vulkan/icd.d "${HOME:-/root}/.local/share/vulkan/icd.d"; do
    compgen -G "$folder/*.json" >/dev/null && return 0
  done
  return 1
}

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

can_install() {
  command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }
}

# The software driver of Mesa in Debian's backports is about twice as fast as the one in Debian 12.
# Uses the mirror that the system already uses.
enable_backports() {
  . /etc/os-release
  [ "${ID:-}" = debian ] || return 1
  grep -rqs "${VERSION_CODENAME}-backports" /etc/apt/sources.list /etc/apt/sources.list.d && return 0
  local uri
  uri=$(grep -hsE '^URIs:' /etc/apt/sources.list.d/*.sources | grep -v security | awk '{print $2; exit}')
  [ -n "$uri" ] || uri=$(grep -hsE '^deb ' /etc/apt/sources.list | grep -v security | sed 's/\[[^]]*\]//' | awk '{print $2; exit}')
  [ -n "$uri" ] || return 1
  echo "deb $uri ${VERSION_CODENAME}-backports main" | as_root tee /etc/apt/sources.list.d/wgpu-lora-backports.list >/dev/null
}

install_mesa() {
  local target=() versions
  if enable_backports; then
    . /etc/os-release
    as_root apt-get update -q
    versions=$(apt-cache policy mesa-vulkan-drivers)
    [[ $versions == *"${VERSION_CODENAME}-backports"* ]] && target=(-t "${VERSION_CODENAME}-backports")
  else
    as_root apt-get update -q
  fi
  DEBIAN_FRONTEND=noninteractive as_root apt-get install -y -q --no-install-recommends "${target[@]}" mesa-vulkan-drivers libvulkan1
}

install_swiftshader() {
  local folder=$1 work
  [ -f "$folder/swiftshader.json" ] && return 0
  work=$(mktemp -d)
  trap 'rm -rf "$work"' RETURN
  (cd "$work" && apt-get download -q chromium-common && dpkg-deb -x chromium-common*.deb .)
  mkdir -p "$folder"
  find "$work" -name 'libvk_swiftshader.so' -exec cp {} "$folder/" \;
  printf '{"file_format_version": "1.0.0", "ICD": {"library_path": "%s/libvk_swiftshader.so", "api_version": "1.3.0"}}\n' \
    "$folder" >"$folder/swiftshader.json"
}

install_drm_shim() {
  local folder=$1 work version
  compgen -G "$folder/*_noop_drm_shim.so" >/dev/null && return 0
  version=$(dpkg-query -W -f '${Version}' mesa-vulkan-drivers)
  work=$(mktemp -d)
  trap 'rm -rf "$work"' RETURN
  (cd "$work" && apt-get download -q "mesa-drm-shim=$version" && dpkg-deb -x mesa-drm-shim*.deb .) >&2 || return 1
  find "$work" -name '*_noop_drm_shim.so' -exec cp {} "$folder/" \;
}

case "$(uname -s)" in
  Darwin | MINGW* | MSYS*) exit 0 ;; # Metal and DX12 come with the system
esac

if ! have_driver; then
  if can_install; then
    echo "No Vulkan driver found: installing Mesa's software driver."
    install_mesa
  else
    echo "No Vulkan driver found, and this user may not install one: install your GPU's driver, or 'mesa-vulkan-drivers' and 'libvulkan1' (Debian, Ubuntu), then run this again." >&2
    exit 1
  fi
fi

if [ "${1:-}" = --drm-shim ]; then
  folder=$(mkdir -p "${2:?--drm-shim needs a folder}" && cd "$2" && pwd)
  command -v apt-get >/dev/null || { echo "Mesa's drm shims are downloaded with apt-get, which is not installed here." >&2; exit 1; }
  [ -n "$(find /var/lib/apt/lists -name '*Packages*' 2>/dev/null | head -1)" ] || as_root apt-get update -q >&2
  install_drm_shim "$folder" || {
    echo "Mesa's drm shims (the package 'mesa-drm-shim' in the version of 'mesa-vulkan-drivers') could not be downloaded: check the network, and that the package sources have that version." >&2
    exit 1
  }
fi

if [ "${1:-}" = --chromium ] && ! command -v chromium >/dev/null; then
  can_install || { echo "Chromium is missing, and this user may not install it: install the package 'chromium', then run this again." >&2; exit 1; }
  [ -n "$(find /var/lib/apt/lists -name '*Packages*' 2>/dev/null | head -1)" ] || as_root apt-get update -q
  DEBIAN_FRONTEND=noninteractive as_root apt-get install -y -q --no-install-recommends chromium >&2
fi

if [ "${1:-}" = --swiftshader ]; then
  folder=$(mkdir -p "${2:?--swiftshader needs a folder}" && cd "$2" && pwd)
  if [ ! -f "$folder/swiftshader.json" ]; then
    command -v apt-get >/dev/null || { echo "SwiftShader is downloaded with apt-get, which is not installed here." >&2; exit 1; }
    [ -n "$(find /var/lib/apt/lists -name '*Packages*' 2>/dev/null | head -1)" ] || as_root apt-get update -q
    install_swiftshader "$folder"
  fi
fi
