"""Claims of a training machine, and a policy with every rule that accepts exactly them."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import strategies as st
from pyrage import x25519

from wgpu_lora.protect.attestation.claims import Evidence
from wgpu_lora.protect.sealed.keys import PublicKey

NOW = 1_800_000_000
NONCE = "4c0ffee0" * 8


def digest(name: int | str) -> str:
    """A SHA-256 for tests, another for each name."""
    return hashlib.sha256(str(name).encode()).hexdigest()


def recipient() -> str:
    return str(x25519.Identity.generate().to_public())


def public_pem() -> str:
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


# Fixed, since names of tests may contain them.
OWNER = "age16kefsu5htzeapd8ferw0l2wyujnqpnnwk8d428wr8hq9kenchsaspvex9a"
EPHEMERAL = "age1f7zee8y485a9jzclj9r46g0qklcr80l36f8k74s5llvq349a6vsqvc4eas"
TPM = (
    "-----BEGIN PUBLIC KEY-----\n"
    "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEtt3WYcENY5XSMPNiUdHgPLcHuH13\n"
    "TuXivNkyergeLZuC1C1ltgQun6w6hdbp8eF2YlEz+hvmJMW7pt2xq+JIKw==\n"
    "-----END PUBLIC KEY-----\n"
)
SESSION = (
    "-----BEGIN PUBLIC KEY-----\n"
    "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEOVtFKPzVKKBdz6ORBqivB9AFDhFW\n"
    "OcxYdGJrvLuSPvAGe54bKSFE9FpZMpYJs8PVdkUxNrMWxT1VRR0buYqvTA==\n"
    "-----END PUBLIC KEY-----\n"
)


@dataclass(frozen=True)
class Given(Evidence):
    """Verified evidence, as `appraise` takes it."""

    def changed(self, path: str, value: Any) -> Given:
        """With one value replaced, or removed by `...`; `quote.` leads into the quote."""
        root = copy.deepcopy({**self.claims, "quote": self.quote})
        *parents, last = path.split(".")
        place = root
        for part in parents:
            place = place[int(part) if isinstance(place, list) else part]
        key = int(last) if isinstance(place, list) else last
        if value is ...:
            del place[key]
        else:
            place[key] = value
        quote = root.pop("quote", None)
        return replace(self, claims=root, quote=quote)


GIVEN = Given(
    claims={
        "eat_nonce": NONCE,
        "iat": NOW - 2,
        "level": "quoted",
        "keys": {"recipient": EPHEMERAL, "signing": SESSION},
        "package": {"version": "0.5.0", "sha256": digest("package")},
        "wgpu": {"version": "0.32.1", "native_version": "27.0.2.0", "native_sha256": digest("native")},
        "python": {
            "version": "3.12.4",
            "implementation": "CPython",
            "sha256": digest("python"),
            "library_sha256": digest("library"),
        },
        "dependencies": {
            "numpy": {"version": "2.1.0", "sha256": digest("numpy"), "intact": True},
            "ml-dtypes": {"version": "0.5.0", "sha256": digest("ml-dtypes"), "intact": True},
        },
        "device": {"name": "NVIDIA GeForce RTX 4090", "backend": "Vulkan", "kind": "discrete", "driver": "580.95.05"},
        "kernel": {"system": "Linux", "release": "6.8.0-79-generic", "version": "#79", "machine": "x86_64"},
        "environment": {"VK_ICD_FILENAMES": digest("icd")},
        "process": {
            "traced": False,
            "compiled_otherwise": [],
            "import_hooks": ["_EditableFinder"],
            "unlisted": {"/opt/here.pth": digest("pth")},
            "libraries": {"/usr/lib/libvulkan.so.1": digest("loader")},
        },
        "base": {"name": "Qwen2.5-0.5B", "sha256": digest("base"), "config_sha256": digest("config")},
        "job": {
            "name": "ward-7",
            "sha256": digest("job"),
            "recipients": [OWNER],
            "data": [
                {"role": "data", "name": "train.jsonl.age", "sha256": digest("train"), "bytes": 9000, "rows": 800},
                {"role": "eval_data", "name": "held.jsonl.age", "sha256": digest("held"), "bytes": 900, "rows": 80},
            ],
            "recipe_sha256": digest("recipe"),
            "options": {"learning_rate": 2e-4, "objective": "sft", "max_steps": 100, "packing": True},
        },
        "resume": {"sequence": 9, "head": digest("head")},
        "host": {"core_dumps": {"off": True}, "memory": {"locked": "keys"}, "swap": []},
    },
    quote={"key_pem": TPM, "pcrs": {0: digest("pcr0"), 7: digest("pcr7")}},
    signing=PublicKey.parse(SESSION),
    recipient=EPHEMERAL,
    sha256=digest("evidence"),
)

ALL_RULES = f"""
[policy]
name = "ward"
version = 3
[nonce]
seconds = 300
skew = 5
[release]
seconds = 3600
sessions = 10
recipients = ["{OWNER}"]
[attestation]
level = "quoted"
tpm_keys = ['''{TPM}''']
pcrs = {{ 0 = "{digest("pcr0")}", 7 = "{digest("pcr7")}" }}
[data]
sha256 = ["{digest("train")}", "{digest("held")}"]
[job]
names = ["ward-7"]
sha256 = ["{digest("job")}"]
[base]
sha256 = ["{digest("base")}"]
config_sha256 = ["{digest("config")}"]
[recipe]
sha256 = ["{digest("recipe")}"]
[recipe.options]
learning_rate = {{ min = 1e-5, max = 1e-3 }}
objective = {{ allow = ["sft"] }}
packing = true
[training]
min_rows = 800
max_steps = 100
[package]
versions = ">=0.5,<0.6"
sha256 = ["{digest("package")}"]
[wgpu]
versions = ">=0.32,<0.33"
native_versions = "==27.*"
native_sha256 = ["{digest("native")}"]
[python]
versions = "==3.12.*"
implementations = ["CPython"]
sha256 = ["{digest("python")}"]
library_sha256 = ["{digest("library")}"]
[dependencies]
intact = true
only_pinned = true
[dependencies.pinned]
numpy = "{digest("numpy")}"
ML_dtypes = ["{digest("other")}", "{digest("ml-dtypes")}"]
[host]
no_core_dumps = true
no_swap = true
[process]
untraced = true
compiled = true
import_hooks = ["_EditableFinder"]
unlisted = ["{digest("pth")}"]
libraries = ["{digest("loader")}", "{digest("driver")}"]
[device]
names = ["NVIDIA GeForce RTX 40?0"]
backends = ["Vulkan", "Metal"]
kinds = ["discrete"]
drivers = ["580.*"]
[kernel]
systems = ["Linux"]
releases = ["6.8.*"]
machines = ["x86_64"]
[environment]
forbidden = ["LD_*"]
[environment.only]
VK_ICD_FILENAMES = "{digest("icd")}"
LD_PRELOAD = "{digest("preload")}"
"""

LEAST = f"""
[policy]
name = "ward"
version = 1
[release]
recipients = ["{OWNER}"]
[attestation]
level = "self-reported"
[data]
sha256 = ["{digest("train")}", "{digest("held")}"]
"""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
