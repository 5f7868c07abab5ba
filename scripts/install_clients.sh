#!/usr/bin/env bash
# Installs clients of servers into .clients, for `make test-clients`: Python's in an environment over .venv, since some
# want older libraries than it has, and the AI SDK of npm, if there is a node or apt-get to install one.
set -euo pipefail
cd "$(dirname "$0")/.."

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

.venv/bin/python -m venv --without-pip .clients
for packages in .venv/lib/python3*/site-packages; do
  echo "import site; site.addsitedir('$PWD/$packages')" > ".clients/lib/$(basename "$(dirname "$packages")")/site-packages/base.pth"
done
# Only what the tests import is compiled, and only once they do.
.clients/bin/python -m pip install -q --disable-pip-version-check --no-compile -e ".[clients${WGPU_LORA_TESTS_FULL:+,lm-eval}]"

if ! command -v npm >/dev/null && command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }; then
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nodejs npm >/dev/null
fi
if command -v npm >/dev/null; then
  npm install --prefix .clients --no-audit --no-fund --silent ai@6 @ai-sdk/openai@3 @ai-sdk/openai-compatible@2 zod@4
else
  echo "There is no npm: the AI SDK is not tested."
fi
