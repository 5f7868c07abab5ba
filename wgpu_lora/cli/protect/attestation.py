"""wgpu-lora protect attest, policy, verify and check: evidence, and what is required of it."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_urlsafe
from typing import Annotated, Any

import typer

from wgpu_lora.cli.console import console, line, print_json, table
from wgpu_lora.cli.parameters import Device, Json
from wgpu_lora.cli.protect.broker import OUTPUT, Policy, file
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun, join_words


def attest(
    nonce: Annotated[str, typer.Option(help="The verifier's nonce; 'wgpu-lora protect nonce' prints one.")],
    job: Annotated[Path | None, file("JOB.toml, whose facts are stated too.")] = None,
    device: Device = None,
    output: Annotated[Path, file("Where the evidence goes.", "FILE", *OUTPUT)] = Path("evidence.json"),
    quote: Annotated[
        bool | None,
        typer.Option("--quote/--no-quote", help="Have the TPM sign the claims; by default if there is one."),
    ] = None,
) -> int:
    """Write signed evidence of this machine, its software and a job, and print what it claims.

    'protect verify' appraises it. No key can be released to it: training attests with keys of its own.
    """
    from wgpu_lora.files.atomic import check_file, replace_file
    from wgpu_lora.protect.attestation import claims
    from wgpu_lora.protect.runs.protected_run import machine_claims
    from wgpu_lora.protect.sealed.keys import SessionKeys

    claims.check_nonce(nonce)
    check_file(output, "--output")
    with SessionKeys.generate() as keys:
        evidence = claims.attest(machine_claims(nonce, keys, job, device), keys, quote)
    replace_file(output, evidence, "--output")
    read = claims.read_evidence(evidence)
    console().print(table(("claim", "what is claimed"), _rows(read.claims, read.quote), ("claim", "what is claimed")))
    line("level", f"{read.claims['level']}. {read.claims['level_note']}")
    if "no_quote" in read.claims:
        line("no quote", read.claims["no_quote"])
    line("evidence", f"{output}, SHA-256 {read.sha256}")
    return 0


# What is printed of claims: a name, and the claims that are shown.
CLAIMS = {
    "keys": "{keys[recipient]}",
    "nonce": "{eat_nonce}",
    "package": "{package[version]}, {package[sha256]:.16}",
    "wgpu-native": "{wgpu[native_version]}, {wgpu[native_sha256]:.16}",
    "Python": "{python[version]}, {python[sha256]:.16}",
    "kernel": "{kernel[system]} {kernel[release]} {kernel[machine]}",
    "device": "{device[name]} ({device[backend]}), {device[driver]}",
    "base": "{base[name]}, {base[sha256]:.16}",
    "job": "{job[name]}, {job[sha256]:.16}",
}


def _rows(claims: dict[str, Any], quote: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The claims in short, as far as they are stated."""
    rows = []
    for name, text in CLAIMS.items():
        with suppress(KeyError):
            rows.append((name, text.format_map(claims)))
    packages, process = claims["dependencies"], claims["process"]
    changes = ", ".join(name for name, package in packages.items() if not package["intact"])
    rows += [
        ("dependencies", f"{len(packages)} packages, {f'changed: {changes}' if changes else 'all intact'}"),
        ("of no package", f"{len(process['unlisted'])} modules, {len(process.get('libraries', ()))} libraries"),
        ("variables", ", ".join(claims["environment"]) or "none"),
    ]
    if process["compiled_otherwise"]:
        rows.append(("compiled files", f"{len(process['compiled_otherwise'])} do not fit their sources"))
    for dataset in claims.get("job", {}).get("data", ()):
        rows.append(
            (dataset["role"], f"{dataset['name']}, {dataset.get('rows', 'unknown')} rows, {dataset['sha256']:.16}")
        )
    rows += [("recipient", recipient) for recipient in claims.get("job", {}).get("recipients", ())]
    if quote is not None:
        rows.append(("TPM", f"PCRs {', '.join(map(str, sorted(quote['pcrs'])))}, restarts {quote['reset_count']}"))
    return rows


def policy(
    source: Annotated[
        Path,
        typer.Argument(metavar="JOB|EVIDENCE", help="A job, to run on this machine, or a trainer's evidence (.json)."),
    ],
    strict: Annotated[
        bool, typer.Option("--strict", help="Pin every digest and release, so that each update needs a new policy.")
    ] = False,
    device: Device = None,
) -> int:
    """Print a policy that accepts one job on one machine, to be read and edited by the owner of the data.

    Every rule is explained in docs/protected-owners.md. From evidence, its claims become the reference values: check
    them first. What is not known, or not so on that machine, is a comment.
    """
    from wgpu_lora.protect.attestation.claims import load_evidence
    from wgpu_lora.protect.policies.policy_template import policy_for
    from wgpu_lora.protect.runs.protected_run import machine_claims
    from wgpu_lora.protect.sealed.keys import SessionKeys

    if source.suffix.lower() != ".json":
        with SessionKeys.generate() as keys:
            claims, quote = machine_claims(token_urlsafe(), keys, source, device), None
    else:
        if device is not None:
            raise UserError("--device does not apply to evidence, which states its own: leave it out, or give the job.")
        evidence = load_evidence(source)
        claims, quote = evidence.claims, evidence.quote
        if "job" not in claims:
            raise UserError(f"{source} states no job, so it has no data to allow: attest with --job JOB.toml.")
    typer.echo(policy_for(claims, quote, strict), nl=False)
    return 0


def verify(
    evidence: Annotated[
        Path, typer.Argument(metavar="EVIDENCE", help="Evidence, or statement.json of a finished run.")
    ],
    policy: Policy,
    nonce: Annotated[
        str | None, typer.Option(help="The nonce that was issued for this evidence; not checked if not given.")
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Check as of this time (ISO 8601), for evidence that was kept.")
    ] = None,
    json: Json = False,
) -> int:
    """Appraise evidence by a policy, and name every rule that failed.

    Evidence is that of `protect attest`, or evidence-N.json of a run. Of a finished run, statement.json is checked with
    the evidence beside it: also the rows and steps that were trained. Exit code 0 if it passes, 1 if it does not.
    """
    from wgpu_lora.protect.policies import appraisal
    from wgpu_lora.protect.policies.policy import Policy

    now = time.time() if at is None else _time(at)
    rules = Policy.read(policy)
    result, subject = appraisal.verify(evidence, rules, nonce, now)
    code = 0 if result.passed else 1
    if json:
        print_json(result.to_json())
        return code
    line("policy", f"{rules['policy.name']}, version {rules['policy.version']}, SHA-256 {rules.sha256}")
    line("evidence", f"{subject}, SHA-256 {result.evidence_sha256}, {result.level}")
    for failure in result.failures:
        line("failed", failure.line())
    if result.not_applied:
        names = join_words(result.not_applied)
        line("unchecked", f"not restricted by the policy, or without a value to check: {names}")
    checked = count_noun(len(result.applied), "rule")
    failed = {failure.rule for failure in result.failures}
    line("result", f"refused: {len(failed)} of {checked} failed" if failed else f"passed: {checked}")
    return code


def _time(text: str) -> float:
    """Unix time of a date; without a zone it is in UTC."""
    try:
        result = datetime.fromisoformat(text)
        return (result if result.tzinfo else result.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise UserError(f"--at must be a time such as 2026-01-31T12:00:00Z, not {text!a:.60}.") from None


def check(
    run: Annotated[Path, typer.Argument(help="Output directory of a protected run.", metavar="RUN")],
    broker_key: Annotated[
        Path | None, typer.Option(help="The broker's public key, whose signature endorses the run's keys.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Policy under which the key was released; the evidence is appraised again.")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Directory of the opened adapter, to verify its signature and files.")
    ] = None,
    json: Json = False,
) -> int:
    """Verify the evidence of a protected run, offline.

    Verifies the log's chain and signatures, each session's attestation and release, the sealed files, the cleanup
    record, the final statement and, if it is given, the opened adapter. Says which parts fail; else, in one line, what
    is proven and what is only claimed. Without the broker's key nothing is proven about who ran it. The exit code is 1
    if a part fails.
    """
    from wgpu_lora.protect import check as checking
    from wgpu_lora.protect.policies.policy import Policy
    from wgpu_lora.protect.sealed.keys import PublicKey

    key, rules = PublicKey.read(broker_key) if broker_key else None, Policy.read(policy) if policy else None
    result = checking.check(run, key, rules, adapter)
    if json:
        print_json(result.to_json())
    else:
        for sentence in result.failures:
            line("failed", sentence)
        line("failed" if not result.verified else "verified" if key else "unproven", result.line())
    return 0 if result.verified else 1
