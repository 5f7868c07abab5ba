#!/usr/bin/env bash
# Tests of products on matrix units, on lavapipe of the newest Mesa, which has them. Arguments are pytest's.
set -euo pipefail
cd "$(dirname "$0")/.."
root=${XDG_CACHE_HOME:-$HOME/.cache}/wgpu-lora-sid
run=(scripts/gpu_compilers/root.sh run "$root")

scripts/gpu_compilers/root.sh make "$root"
"${run[@]}" /venv/bin/python -c 'import pytest, hypothesis, wgpudawn, importlib.metadata as m; m.version("wgpu-lora")' 2>/dev/null ||
  "${run[@]}" env PIP_CERT=/etc/ssl/certs/ca-certificates.crt /venv/bin/pip install -q --disable-pip-version-check '/checkout[test,dawn]'
"${run[@]}" env HOME=/tmp PYTHONPATH=/checkout:/checkout/tests PYTHONDONTWRITEBYTECODE=1 MESA_SHADER_CACHE_DIR=/tmp \
  VK_DRIVER_FILES=/usr/share/vulkan/icd.d/lvp_icd.json \
  /venv/bin/python -m pytest -q -p no:cacheprovider --rootdir /checkout /checkout/tests/matrix "$@"
