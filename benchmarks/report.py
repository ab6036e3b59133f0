"""Measures the page of a run: the time to write it, its size, and the time in which it opens.

    python benchmarks/report.py
    python benchmarks/report.py --records 1000000

Runs are made up, with as many records as asked for. Writing is measured in seconds of this process.
A page opens in headless Chromium, if there is one, until its first frame is drawn, by the browser's
own clock. The last line is JSON.
"""

import argparse
import json
import math
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from step_time import machine

from jddp.workbench.facts import read_facts
from jddp.workbench.run_page import draw_run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
# The first frame has been drawn when the second is begun.
CLOCK = """<script>addEventListener('load', () => requestAnimationFrame(() => requestAnimationFrame(
  () => console.log(`opened in ${performance.now()} ms`))))</script>"""


def make_run(folder: Path, num_records: int) -> None:
    """Writes the records and the log of a run with an evaluation every 500 steps."""
    rng = random.Random(0)
    (folder / "logs").mkdir()
    with (
        (folder / "metrics.jsonl").open("w") as records,
        (folder / "logs" / "process_0.log").open("w") as log,
    ):
        log.write("2026-01-01 00:00:00,000 INFO begins: process 7 on node1\n")
        for step in range(1, num_records + 1):
            loss = 0.2 + 2.1 * math.exp(-6 * step / num_records) + rng.gauss(0, 0.05)
            values = {"accuracy": 0.9 - loss / 4, "count": 256.0, "loss": loss}
            rates = {"learning_rate": 1e-3 * (1 - step / num_records), "grad_norm": 3 * loss}
            seconds = abs(rng.gauss(0.06, 0.01))
            times = {"step_seconds": seconds, "data_wait_seconds": 1e-3, "mfu": 0.02 / seconds}
            times |= {"examples_per_second": 256 / seconds, "tokens_per_second": 65_536 / seconds}
            record = {"step": step, "split": "train", **values, **rates, **times}
            records.write(json.dumps(record) + "\n")
            at = f"2026-01-01 {step // 3600 % 24:02}:{step // 60 % 60:02}:{step % 60:02},000"
            log.write(f"{at} INFO step {step}/{num_records}  loss {loss:.4g}  ETA 0:18\n")
            if step % 500 == 0:
                record = {"step": step, "split": "eval", **values, "examples": 10_000}
                records.write(json.dumps(record) + "\n")


def seconds_to_open(path: Path, text: str) -> float | None:
    """Seconds from the start of loading to the first frame; None without a browser."""
    if BROWSER is None:
        return None
    path.write_text(text.replace("</body>", f"{CLOCK}</body>"))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    with tempfile.TemporaryDirectory() as profile:
        options += [f"--user-data-dir={profile}", f"--screenshot={profile}/page.png"]
        command = [BROWSER, *options, "--window-size=1200,2000", path.as_uri()]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return float(re.search(r"opened in ([\d.]+) ms", told)[1]) / 1e3


def measure(num_records: int, rounds: int) -> dict[str, float | None]:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        make_run(folder, num_records)
        written, opened = [], []
        for _ in range(rounds):
            since = time.process_time()
            text = draw_run(read_facts(folder))
            written.append(time.process_time() - since)
            opened.append(seconds_to_open(folder / "page.html", text))
    seconds = [x for x in opened if x is not None]
    return {
        "records": num_records,
        "write_seconds": statistics.median(written),
        "bytes": len(text.encode()),
        "open_seconds": statistics.median(seconds) if seconds else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, nargs="+", default=[100, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found = [measure(number, arguments.rounds) for number in arguments.records]
    for x in found:
        opened = "no browser" if x["open_seconds"] is None else f"{x['open_seconds']:.2f} s to open"
        size = f"{x['bytes'] / 1e3:.0f} kB"
        print(f"{x['records']:>9,} records  {x['write_seconds']:.2f} s to write  {size}  {opened}")
    print(json.dumps({**machine(), "results": found}))


if __name__ == "__main__":
    main()
