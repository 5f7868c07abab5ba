#!/usr/bin/env bash
# Installs a TPM in software (swtpm), and what tpm2-pytss is built with, for `make test-tpm`.
set -euo pipefail

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

command -v swtpm >/dev/null && pkg-config --exists tss2-esys 2>/dev/null && exit 0
if ! command -v apt-get >/dev/null; then
  echo "Install swtpm, pkg-config, a C compiler and tpm2-tss with its headers, then run this again." >&2
  exit 1
fi
as_root apt-get update -qq
as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends swtpm libtss2-dev gcc pkg-config >/dev/null
