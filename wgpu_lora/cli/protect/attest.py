"""wgpu-lora protect attest: evidence of what would train, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from wgpu_lora.cli.console import console, line, table
from wgpu_lora.cli.parameters import Device

SHORT = 16  # hexadecimal digits of a digest


def attest(
    nonce: Annotated[str, typer.Option(help="The verifier's nonce; 'wgpu-lora protect nonce' prints one.")],
    job: Annotated[Path | None, typer.Option(metavar="FILE", help="JOB.toml, whose facts are stated too.")] = None,
    device: Device = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the evidence goes.")] = Path(
        "evidence.json"
    ),
    quote: Annotated[
        bool | None,
        typer.Option("--quote/--no-quote", help="Have the TPM sign the claims; by default if there is one."),
    ] = None,
) -> int:
    """Write signed evidence of this machine, its software and a job, and print what it claims.

    'protect verify' appraises it. No key can be released to it: training attests with keys of its own.
    """
    from wgpu_lora.protect.extra import check_libraries

    check_libraries()
    from wgpu_lora.atomic import check_file, replace_file
    from wgpu_lora.gpu.device_list import choose
    from wgpu_lora.protect.attestation import claims
    from wgpu_lora.protect.hygiene.host import harden
    from wgpu_lora.protect.sealed.keys import SessionKeys

    claims.check_nonce(nonce)
    check_file(output, "--output")
    host, keys = harden(), SessionKeys.generate()
    try:
        if job is None:
            gathered = claims.gather(choose(device)[0], nonce=nonce, keys=keys, host=host.facts)
        else:
            from wgpu_lora.protect.runs import job as jobs
            from wgpu_lora.protect.runs.reference import job_claims

            gathered = {**job_claims(jobs.read(job), nonce=nonce, keys=keys, device=device), "host": host.facts}
        evidence = claims.attest(gathered, keys, quote)
    finally:
        keys.wipe()
        host.restore()
    replace_file(output, evidence, "--output")
    read = claims.read_evidence(evidence)
    console().print(table(("claim", "what is claimed"), _rows(read.claims, read.quote), ("claim", "what is claimed")))
    line("level", f"{read.claims['level']}. {read.claims['level_note']}")
    if "no_quote" in read.claims:
        line("no quote", read.claims["no_quote"])
    line("evidence", f"{output}, SHA-256 {read.sha256}")
    return 0


def _rows(claims: dict[str, Any], quote: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The claims in short."""
    package, wgpu, python, kernel = (claims[name] for name in ("package", "wgpu", "python", "kernel"))
    others = claims["dependencies"]
    changed = [name for name, one in others.items() if not one["intact"]]
    process = claims["process"]
    rows = [
        ("nonce", claims["eat_nonce"]),
        ("package", f"{package['version']}, {len(package['files'])} files, {package['sha256'][:SHORT]}"),
        ("wgpu-native", f"{wgpu['native_version']}, {wgpu['native_sha256'][:SHORT]}"),
        ("Python", f"{python['version']}, {python['sha256'][:SHORT]}"),
        ("dependencies", f"{len(others)} packages, " + (f"changed: {', '.join(changed)}" if changed else "all intact")),
        ("of no package", f"{len(process['unlisted'])} modules, {len(process.get('libraries', ()))} libraries"),
        ("kernel", " ".join(kernel[name] for name in ("system", "release", "machine") if name in kernel)),
        ("variables", ", ".join(claims["environment"]) or "none"),
    ]
    if process["compiled_otherwise"]:
        rows.append(("compiled files", f"{len(process['compiled_otherwise'])} do not fit their sources"))
    if device := claims.get("device"):
        rows.append(("device", f"{device['name']} ({device['backend']}), {device['driver']}"))
    if base := claims.get("base"):
        rows.append(("base", f"{base['name']}, {base['sha256'][:SHORT]}"))
    if job := claims.get("job"):
        rows.append(("job", f"{job['name']}, {job['sha256'][:SHORT]}"))
        for one in job["data"]:
            rows.append((one["role"], f"{one['name']}, {one.get('rows', 'unknown')} rows, {one['sha256'][:SHORT]}"))
        rows += [("recipient", recipient) for recipient in job["recipients"]]
    if quote is not None:
        rows.append(("TPM", f"PCRs {', '.join(map(str, sorted(quote['pcrs'])))}, restarts {quote['reset_count']}"))
    return [("keys", claims["keys"]["recipient"]), *rows]
