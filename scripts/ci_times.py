"""Where the minutes of the tests go: seconds by target and by file (`make ci-times`).

    python scripts/ci_times.py [DIRECTORY] [--files 12]

Reads the JUnit files that targets of the Makefile write into `.times`: TARGET.xml, or several TARGET.NAME.xml. Tests
run two at a time, so their sum is up to twice the time that passes, which is shown beside it.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", nargs="?", default=".times", type=Path)
    parser.add_argument("--files", type=int, default=12, help="files to list per target")
    options = parser.parse_args()
    targets: dict[str, list[ElementTree.Element]] = defaultdict(list)
    for path in sorted(options.directory.glob("*.xml")):
        targets[path.name.split(".")[0]] += ElementTree.parse(path).iter("testsuite")
    for target, suites in targets.items():
        seconds: dict[str, float] = defaultdict(float)
        cases: dict[str, int] = defaultdict(int)
        for case in (case for suite in suites for case in suite.iter("testcase")):
            # a class's name is not a file's: those of files are lower case
            file = "/".join(part for part in case.get("classname", "").split(".") if part == part.lower()) + ".py"
            seconds[file] += float(case.get("time", 0))
            cases[file] += 1
        passed = sum(float(suite.get("time", 0)) for suite in suites)
        print(f"{target}: {sum(cases.values()):,} tests, {sum(seconds.values()):.0f} s, in {passed:.0f} s")
        for file in sorted(seconds, key=lambda name: -seconds[name])[: options.files]:
            print(f"  {seconds[file]:7.1f} s  {cases[file]:5,} tests  {file}")


if __name__ == "__main__":
    main()
