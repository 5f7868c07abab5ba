"""Contracts and their formulas, statistics, result files and their comparison: all that needs no device."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.bench import CEILINGS, result

from wgpu_lora.bench.brick_results import SCHEMA, Result, Writer, compare, read_results, warnings
from wgpu_lora.bench.brick_run import ceilings_broken, floor_seconds, judge
from wgpu_lora.bench.bricks import WORKLOADS
from wgpu_lora.bench.contract import Contract, brick_names, evaluate, load_contract, numbers_of
from wgpu_lora.bench.device_ceilings import Ceilings
from wgpu_lora.bench.result_comparison import read_measured
from wgpu_lora.bench.timing import Timings, repeat, variation
from wgpu_lora.cli.app import main
from wgpu_lora.cli.bench.brick_tables import cells, details, duration, noise_text
from wgpu_lora.errors import UserError
from wgpu_lora.models.published_shapes import cut, shape_config

TOML = """
covers = "a piece"
kind = "training"
options = ["tokens"]
[dims]
T = "tokens"
H = "hidden_size * 2"
[work]
operations = "2 * T * H"
bytes = "4 * T"
[accuracy]
nmse = 1e-9
[budget]
of = "fma"
software = 0.25
discrete = 0.5
when = "T >= 8"
[[bounds]]
metric = "tokens_per_second"
at_least = 50
device = "discrete"
when = "tokens > 1"
"""
KEYS = {"tokens": 8.0, "hidden_size": 3.0}
NOISY = result(seconds=1, spread=0.2, cv_asked=0.05)


# -- formulas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * T * (H + 1)", 56),
        ("-T ** 2 + 7 // 2 + 7 % 4", -10),
        ("ceil(T / 3) * min(T, H) - max(1, 2)", 4),
        ("T >= 4 and H < T", 1),
        ("T == 4 and H > T", 0),
        ("T * 1.5e3", 6000),
        ("T \\\n* H", 24 - 12),
    ],
)
def test_formula(text: str, value: float) -> None:
    assert evaluate(text, {"T": 4, "H": 6} if "(H + 1)" in text else {"T": 4, "H": 3}, "here") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2 * Z", "bricks/a.toml: work uses the name Z, which is not known: use one of H, T"),
        ("T +", "not an arithmetic expression"),
        ("__import__('os')", "not an arithmetic expression"),
        ("T.real", "not an arithmetic expression"),
        ("'T'", "not an arithmetic expression"),
        ("True", "not an arithmetic expression"),
        ("[T for T in H]", "not an arithmetic expression"),
        ("T / (H - H)", "has no value"),
        ("1e300 ** 9", "has no value"),
        ("(0 - 1) ** 0.5", "has no value"),
        ("min()", "has no value"),
    ],
)
def test_formula_that_is_none(text: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        evaluate(text, {"T": 4, "H": 6}, "bricks/a.toml: work")
    assert message in str(refused.value)


# -- contracts ---------------------------------------------------------------------------------------------------------


def test_contract() -> None:
    contract = Contract.parse("piece", TOML)
    dims = contract.values(KEYS)
    assert dims == {"T": 8, "H": 6}
    assert (contract.operations(dims), contract.bytes(dims)) == (96, 32)
    assert contract.measure.warmup == 3
    assert contract.measure.iterations == 5
    assert (contract.budget.share("software"), contract.budget.share("integrated")) == (0.25, None)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("covers =", "cover =", "'cover' is not known: did you mean 'covers'?"),
        ('covers = "a piece"', "", "'covers' is missing: add it."),
        ('kind = "training"', 'kind = "zork"', "'kind' must be 'training' or 'serving', not"),
        ('of = "fma"', 'of = "zork"', "'budget.of' must be 'fma', 'bandwidth', "),
        ('of = "fma"', 'of = "fma"\nhardware = 1', "'budget.hardware' is not known: use of, "),
        ("software = 0.25", 'software = "much"', "'budget.software' must be a number, not "),
        ("software = 0.25", "software = 0", "'budget.software' must be greater than 0, not 0."),
        ("software = 0.25", "software = true", "'budget.software' must be a number, not true."),
        ("nmse = 1e-9", "nmse = nan", "'accuracy.nmse' must be a finite number, not NaN."),
        ('bytes = "4 * T"', "bytes = 4", "'work.bytes' must be text, not 4."),
        ('bytes = "4 * T"', 'bytes = "4 * tokens"', "bricks/piece.toml: work.bytes uses the name tokens"),
        ("at_least = 50", "at_least = 50\nat_most = 60", "needs one of at_most and at_least"),
        ("at_least = 50", "", "needs one of at_most and at_least"),
        ('device = "discrete"', 'device = "zork"', "'bounds[0].device' must be 'discrete', "),
        ("[work]", "[measure]\nwarmup = 2.5\n[work]", "'measure.warmup' must be a whole number, not 2.5."),
        ("[dims]", "[dims", "is not valid TOML"),
        ("[[bounds]]", "[bounds]", "must be a list, not"),
        ('options = ["tokens"]', "", "'options' is missing: add it."),
        ('options = ["tokens"]', 'options = "tokens"', "must be a list, not"),
        ('options = ["tokens"]', 'options = ["zork"]', "'options[0]' must be 'layers', 'tokens', '"),
    ],
)
def test_contract_that_is_wrong(old: str, new: str, message: str) -> None:
    assert old in TOML
    with pytest.raises(UserError) as refused:
        Contract.parse("piece", TOML.replace(old, new, 1))
    assert message in str(refused.value)
    assert "bricks/piece.toml" in str(refused.value)


def test_every_brick_has_a_contract_and_a_workload() -> None:
    assert set(brick_names()) == set(WORKLOADS)
    for name in brick_names():
        contract = load_contract(name)
        assert contract.accuracy is not None
        assert contract.budget.software is not None


# -- judging -----------------------------------------------------------------------------------------------------------


def judged(device: str = "software", toml: str = TOML, share: float = 1.0, **changes: Any) -> list[str]:
    """What is broken of a result that reaches a share of its budget."""
    outcome = result("piece", budget={"of": "fma", "asked": None, "reached": share}, **changes)
    judge(Contract.parse("piece", toml), outcome, {**KEYS, "T": 8.0, "H": 6.0}, device)
    return outcome.broken


SHORT = "reaches 20% of the device's compute ceiling, at least 25% (20% short)"
FAST, SLOW = {"tokens_per_second": 50.0}, {"tokens_per_second": 40.0}
JUDGED: list[tuple[dict[str, Any], list[str]]] = [
    ({"share": 0.25, "reference": {"nmse": 1e-10, "kernel": "k"}}, []),
    ({"share": 0.2}, [SHORT]),
    ({"share": 0.2, "toml": TOML.replace("T >= 8", "T > 8")}, []),
    ({"share": 0.0, "device": "unknown"}, []),
    ({"device": "discrete", "extra": FAST}, []),
    ({"device": "software", "extra": SLOW}, []),
    ({"device": "discrete", "extra": SLOW}, ["tokens_per_second is 40, at least 50 (20% short)"]),
    (
        {"device": "discrete", "extra": SLOW, "toml": TOML.replace("at_least = 50", "at_most = 30")},
        ["tokens_per_second is 40, at most 30 (33% over)"],
    ),
    *(
        ({"reference": {"nmse": error, "kernel": "k"}}, [f"k is off its reference: NMSE {error}, at most 1e-09"])
        for error in (2e-9, float("inf"), float("nan"))
    ),
]


@pytest.mark.parametrize(("options", "broken"), JUDGED)
def test_results_are_judged(options: dict[str, Any], broken: list[str]) -> None:
    assert judged(**options) == broken


def test_a_bound_needs_what_is_measured() -> None:
    with pytest.raises(UserError, match=r"bounds tokens_per_second, which is not measured: use one of gbs, gflops"):
        judged("discrete")


def test_floors() -> None:
    seconds = floor_seconds(CEILINGS, 1e9, 2e9)  # 100 and 20 GFLOP/s, 10 GB/s
    assert seconds == pytest.approx({"fma": 0.01, "decode_fma": 0.05, "bandwidth": 0.2, "floor": 0.2, "lower": 0.2})
    assert floor_seconds(CEILINGS, 1e12, 1e9)["lower"] == pytest.approx(50)


@pytest.mark.parametrize(("fma", "numpy", "share"), [(90, 100, None), (1, None, None), (50, 100, "0.50")])
def test_a_ceiling_below_numpy_is_none(fma: float, numpy: float | None, share: str | None) -> None:
    messages = ceilings_broken(Ceilings(fma, 1, 1, 1, numpy, "host"))
    assert [f"FMA chains reach {share} of NumPy's matmul" in text for text in messages] == [True] * bool(share)


# -- statistics --------------------------------------------------------------------------------------------------------


def test_timings() -> None:
    timings = Timings.of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert (timings.seconds, timings.p20, timings.p80, timings.iterations) == (3.5, 2.0, 5.0, 6)
    assert timings.cv == pytest.approx(0.5345, abs=1e-4)
    assert Timings.of([2.0]).cv == 0
    assert variation([0.0, 0.0]) == 0


@pytest.mark.parametrize(
    ("first", "cycle", "limit", "least", "most"),
    [
        ([], [1.0], 100, 5, 5),
        ([], [1.0, 2.0], 0, 5, 5),  # the least, however long it takes
        ([], [1.0, 2.0], 10, 14, 14),
        ([1.2], [1.0], 100, 6, 39),
    ],
)
def test_repeating_ends_with_agreement_or_the_time(
    first: list[float], cycle: list[float], limit: float, least: int, most: int
) -> None:
    now, values = itertools.count(), itertools.chain(first, itertools.cycle(cycle))  # a second a question
    assert least <= len(repeat(lambda: next(values), 5, 0.05, limit, clock=lambda: next(now))) <= most


# -- results -----------------------------------------------------------------------------------------------------------

HEADER = {
    "schema": SCHEMA, "kind": "header", "device": {"name": "a", "driver": "1"}, "options": {"shape": "s", "layers": 2},
}  # fmt: skip


def write_results(path: Path, *results: Result, **header: Any) -> Path:
    writer = Writer(path)
    writer.write({**HEADER, **header})
    for entry in results:
        writer.write(entry.record())
    return path


def test_results_come_back(tmp_path: Path) -> None:
    first = result("ttft", case="7 tokens", broken=["late"], extra={"first_token_ms": 3.0})
    wrong = result(reference={"nmse": float("inf"), "kernel": "k"})
    path = write_results(tmp_path / "a.jsonl", first, wrong)
    assert "Infinity" not in path.read_text()  # which is not JSON
    assert read_results(path) == (HEADER, [first, replace(wrong, reference={"nmse": None, "kernel": "k"})])
    assert first.label == "ttft (7 tokens)"


def line_with(**changes: Any) -> str:
    return json.dumps(HEADER) + "\n" + json.dumps({**result().record(), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zork", "cannot be read as JSON"),
        ("", "is empty"),
        ("[]", "expected an object"),
        ("{}", "has no schema, expected 'wgpu-lora-bench/1'"),
        ('{"schema": "zork/1"}', "has the schema 'zork/1', expected 'wgpu-lora-bench/1'"),
        ('{"schema": "wgpu-lora-bench-training/1"}', "has the schema 'wgpu-lora-bench-training/1'"),
        ('{"schema": "wgpu-lora-bench/2"}', "has version 2 of its schema, but this wgpu-lora reads 1"),
        (json.dumps(HEADER) + '\n{"zork": 1}', "is damaged ('brick' is missing)"),
        (json.dumps(HEADER) + "\n[1]", "expected an object"),
        (json.dumps(HEADER) + "\n" + "[" * 10**5, "is nested too deeply"),
        (line_with(seconds=0.0), "is damaged (a time is not positive)"),
        (line_with(cv=10**400), "is damaged ('cv' must be a finite number, not 1000"),
        (line_with(case=1), "is damaged ('case' must be text, not 1)"),
        ('{"schema": "wgpu-lora-bench/1"}', "is damaged ('device' must be an object, not null)"),
        (json.dumps({**HEADER, "options": [1]}), "is damaged ('options' must be an object, not [1])"),
    ],
)
def test_result_files_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        read_results(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_result_files_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_results(tmp_path / "none")
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "a.jsonl"):
        with pytest.raises(UserError, match=r"choose another|is not a file"), Writer(path):
            pass


def test_results_are_replaced_by_results_only(tmp_path: Path) -> None:
    """A command that is refused after it has opened its file loses nothing."""
    path = write_results(tmp_path / "a.jsonl", result("load"))
    writer = Writer(path)
    assert read_results(path)[1] == [result("load")]
    writer.write(HEADER)
    assert read_results(path)[1] == []


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (result(seconds=1), result(seconds=1.005), "same"),  # the middles overlap
        (result(seconds=1), result(seconds=1.2), "slower"),
        (result(seconds=1.2), result(seconds=1), "faster"),
        (result(seconds=1, spread=0.2), result(seconds=1.3, spread=0.01, p20=1.29), "same"),  # within 2 CVs
        (result(seconds=1, spread=0.01), result(seconds=1.3, spread=0.2, p20=1.25), "same"),
        (result(seconds=1, p80=1.5), result(seconds=1.4), "same"),
        (NOISY, result(seconds=1.1), "noisy"),
        (result(seconds=1.1), NOISY, "noisy"),
        (NOISY, NOISY, "noisy"),
        (NOISY, result(seconds=9), "slower"),  # too large to hide
    ],
)
def test_verdicts_respect_noise(old: Result, new: Result, verdict: str) -> None:
    (comparison,) = compare([old], [new])
    assert comparison.verdict == verdict
    assert comparison.ratio == new.seconds / old.seconds


def test_what_makes_files_hard_to_compare() -> None:
    old = (HEADER, [result("rope"), result("load")])
    new = ({**HEADER, "device": {"name": "b", "driver": "1"}, "options": {"shape": "s", "layers": 3}}, [result("rope")])
    assert warnings(old, old) == []
    assert warnings(old, new) == [
        "name: a before, b now",
        "layers: 2 before, 3 now",
        "only in the old file: load",
    ]
    assert [c.new.label for c in compare(old[1], new[1])] == ["rope"]


def test_how_results_read() -> None:
    assert [duration(s) for s in (2500, 1.5, 0.0123, 4.2e-6)] == ["2,500 s", "1.5 s", "12.3 ms", "4.2 us"]
    measured_result = result(
        reference={"nmse": 1e-12, "kernel": "k", "outputs": 1, "in_part": ["k"]}, clock="timestamps"
    )
    assert cells(measured_result) == ("rope", "1 s", "1%", "1 GFLOP/s", "50%", "none", "passed")
    assert "relative squared error 1.0e-12 against float64 (the largest kernels in part)" in details(measured_result)
    broken = result(
        broken=["late"], extra={"host_share": 0.1234567}, budget={"of": "bandwidth", "asked": 0.02, "reached": 0.01}
    )
    assert cells(broken)[3:] == ("1 GB/s", "1.0%", "2.0%", "failed")
    assert details(broken).endswith("host share 0.1235")
    assert "the host's clock" in details(broken)


def test_timings_that_vary_too_much_do_not_hold(tmp_path: Path) -> None:
    of = {"holds": {"spread": 0.049}, "noisy": {"spread": 0.05}, "broken": {"spread": 0.2, "broken": ["late"]}}
    results = {verdict: result(cv_asked=0.05, **changes) for verdict, changes in of.items()}
    assert {verdict: entry.verdict for verdict, entry in results.items()} == {verdict: verdict for verdict in of}
    assert [cells(entry)[-1] for entry in results.values()] == ["passed", "noisy", "failed"]
    file = tmp_path / "a.jsonl"
    writer = Writer(file)
    writer.write({"schema": SCHEMA, "device": {}, "options": {}})
    for entry in results.values():
        writer.write(entry.record())
    assert [json.loads(line)["verdict"] for line in file.read_text().splitlines()[1:]] == list(of)
    assert read_results(file)[1] == list(results.values())
    assert noise_text(results["noisy"]) == "5 timings vary by 5.0%, the limit is 5%"
    assert result(spread=0.9).verdict == "holds"  # of a file that says nothing of it


@pytest.mark.parametrize("brick", ["lora_forward", "lora_backward"])
@pytest.mark.parametrize(("share", "verdict"), [(0.1, "holds"), (0.26, "broken"), (-0.52, "noisy")])
def test_a_negative_share_neither_holds_nor_fails(brick: str, share: float, verdict: str) -> None:
    outcome = result(brick, extra={"added_share": share})
    judge(load_contract(brick), outcome, {"tokens": 512, "rank": 16, "hidden_size": 512}, "software")
    assert outcome.verdict == verdict
    if verdict == "noisy":
        assert noise_text(outcome) == "added_share is negative, which only noise explains: measure again"
        assert "lost in noise" in details(outcome)
        assert "-52%" not in details(outcome)


# -- counts of models, beside numbers that are written out here --------------------------------------------------------

D, Q, KV, INNER = 896, 896, 128, 4864
NET = {"qkv": 3 * 2048, "z": 2048, "b": 16, "a": 16}
NET_WEIGHTS = 3 * (1024 * sum(NET.values()) + 2048 * 1024) + 1024 * (2 * 2048 + 2 * 512) + 2048 * 1024
NET_WEIGHTS += 4 * 3 * 1024 * 3584


@pytest.mark.parametrize(
    ("shape", "layers", "counted"),
    [
        (
            "qwen2.5-0.5b",
            3,
            {
                "linear_weights": 3 * (2 * D * (Q + KV) + 3 * D * INNER),
                "matrix_weights": 3 * (2 * D * (Q + KV) + 3 * D * INNER),
                "linear_sizes": 3 * (7 * D + 2 * Q + 2 * KV + 3 * INNER),
                "first_modules": 3,
                "first_outputs": Q + 2 * KV,
                "attention_layers": 3,
                "state_values": 0,
            },
        ),
        ("phi-4-mini", 1, {"first_modules": 1, "first_outputs": 3072 + 2 * 1024}),  # fused matrices
        (
            "qwen3.5-0.8b",
            4,
            {
                "linear_weights": NET_WEIGHTS,
                "matrix_weights": NET_WEIGHTS - 3 * 2 * 16 * 1024,  # b and a stay as they are
                "first_modules": 4,
                "first_outputs": sum(NET.values()),
                "attention_layers": 1,
                "state_values": 3 * 16 * 128 * 128,
            },
        ),
    ],
)
def test_numbers_of_a_model(shape: str, layers: int, counted: dict[str, int]) -> None:
    numbers = numbers_of(cut(shape_config(shape), layers))
    assert {name: numbers[name] for name in counted} == counted


# -- result files of all kinds in one table ----------------------------------------------------------------------------


HEAD: dict[str, Any] = {"kind": "header", "device": {"name": "A"}, "time": "2026-11-22T12:00:00+00:00"}
TRAINING = HEAD | {
    "schema": "wgpu-lora-bench-training/2",
    "work": {"recipe": "demo", "options": {"lora_r": 16, "output": "x", "new": 1}},
}
BATCHES = HEAD | {"schema": "wgpu-lora-bench-max-batch/2", "work": {"model": "demo", "layers": 2}}
NAMES = ("seconds", "samples_per_second", "tokens_per_second", "trained_tokens_per_second", "final_loss")
SUMMARY = {"kind": "summary", "spread": {name: {"median": 2.0} for name in NAMES}, "memory": {"peak": 1024}}
PAIR = {"kind": "pair", "batch": 2, "accumulation": 4, "samples_per_second": 3.0}
ROWS = [
    {"kind": "batch", "batch": rows, "gradient_checkpointing": way, "status": status, **figures}
    for rows, way, status, figures in (
        (4, False, "MAX", {"step_seconds": 0.5, "tokens_per_second": 10.0, "planned": 2048}),
        (5, False, "OOM", {"step_seconds": None, "tokens_per_second": None, "planned": None}),
        (8, True, "OK", {"step_seconds": 1.0, "tokens_per_second": 5.0, "planned": 1024}),
    )
]


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_all_kinds_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = TRAINING["work"]["options"]
    other = TRAINING | {"device": {"name": "B"}, "work": {"recipe": "demo", "options": {**options, "lora_r": 8}}}
    del other["work"]["options"]["new"]
    faster = {**SUMMARY, "spread": {**SUMMARY["spread"], "seconds": {"median": 1.0}}}  # type: ignore[dict-item]
    files = [
        write(tmp_path / "a.jsonl", TRAINING, SUMMARY),
        write(tmp_path / "b.jsonl", other, faster, PAIR),
        write(tmp_path / "c.jsonl", BATCHES, *ROWS),
        write(tmp_path / "d.jsonl", HEAD | {"schema": SCHEMA, "options": {}}, result("rope", 0.25).record()),
    ]
    assert main(["bench", "compare", *files[:2]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "file      a: training, A, 2026-11-22T12:00:00+00:00"
    assert lines[2] == "differs   lora r: 16, 8"  # and nothing of paths, or of options of other versions
    assert [line.split() for line in lines[3:5]] == [
        ["measured", "a", "b", "new", "/", "old"],
        ["recipe", "demo:", "time", "2", "s", "1", "s", "0.500"],
    ]
    assert "recipe demo: samples, 2 x 4" in lines[-1]
    assert main(["bench", "--compare", *files]) == 0
    out = capsys.readouterr().out
    assert "demo, 2 layers, largest batch, checkpointing" in out
    assert "demo, 2 layers, 8 rows, checkpointing: tokens" in out
    assert "5 rows" not in out
    assert "250 ms" in out
    faster_rope = result("rope", 0.125).record()
    rope = write(tmp_path / "f.jsonl", HEAD | {"schema": SCHEMA, "options": {}, "device": {"name": "B"}}, faster_rope)
    assert main(["bench", "compare", files[3], rope]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("warning   name: A before, B now", "faster", "0.500"))
    load = write(tmp_path / "e.jsonl", HEAD | {"schema": SCHEMA, "options": {}}, result("load").record())
    assert main(["bench", "compare", files[3], load]) == 2
    assert "have no brick in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty, as after an interrupted run"),
        ([TRAINING], "has no results, as after an interrupted run: measure it again"),
        ([TRAINING | {"schema": "wgpu-lora-bench-training/1"}], "has version 1 of its schema, .* reads 2"),
        ([{"schema": "zork/1"}], r"has the schema 'zork/1', expected 'wgpu-lora-bench/1' or 'wgpu-lora-bench-training"),
        ([TRAINING | {"device": 3}], "is damaged .*'device' must be an object|is damaged .*'device'"),
        ([TRAINING | {"work": {}}, SUMMARY], "is damaged"),
        ([TRAINING, SUMMARY | {"spread": {}}], "is damaged"),
        ([TRAINING, SUMMARY | {"memory": {"peak": "x"}}], "is damaged"),
        ([BATCHES | {"work": {"model": "x"}}, *ROWS], "is damaged"),
        ([BATCHES, ROWS[0] | {"batch": "4"}], "is damaged"),
        ([BATCHES, ROWS[0] | {"step_seconds": [1]}], "is damaged"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_measured(write(tmp_path / "a.jsonl", *lines))
