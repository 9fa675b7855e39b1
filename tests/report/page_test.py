#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Opens the reports of three real runs in Debian's Chromium: the run of `make train`, one of dp 2 x tp 2 x pp 2, and one with two restarts.
Nothing may complain or ask for anything outside the file, figures are there, hovering shows values, two runs can be compared, and names of a run
cannot run a script.

usage: page_test.py LOCKSTEP FOLDER [--pictures DOCS_IMAGES]     pictures and pages are left in FOLDER
"""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys

from chromium import Browser

SMALL = ["--model.hidden", "64", "--train.seq_len", "64", "--train.micro_batch", "4", "--optim.warmup", "5"]
HOSTILE = "a \"'><script>window.injected=1<" + "/script><img src=x onerror=window.injected=1> \U0001f600"


def train(lockstep, source, folder, name, options, resume=False, fault=""):
    run = folder / "runs" / name
    if not resume:
        shutil.rmtree(run, ignore_errors=True)
    start = ["--resume", str(run)] if resume else ["--config", str(source / "examples/train.toml"), "--run.dir", str(run)]
    environment = {**os.environ, **({"LOCKSTEP_FAULT": fault} if fault else {})}
    result = subprocess.run([lockstep, "train", *start, *options], capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        sys.exit(f"{name}: {result.stdout[-2000:]}{result.stderr[-2000:]}")
    return run


def report(lockstep, runs, page):
    subprocess.run([lockstep, "report", *map(str, runs), "--output", str(page)], check=True, stdout=subprocess.DEVNULL)
    return page


def hostile_run(folder, like):
    """A run whose name, settings, events and samples try to be markup."""
    run = folder / "runs" / HOSTILE.replace("/", "_")
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(like, run, ignore=shutil.ignore_patterns("checkpoints", "traces", "attempt_*"))
    with open(run / "events.jsonl", "a") as events:
        for kind in ("warning", "sample", HOSTILE):
            events.write(json.dumps({"event": kind, "step": 3, "time": 1.8e9, "text": HOSTILE, "prompt": HOSTILE}) + "\n")
    with open(run / "config.toml", "a") as config:
        config.write(f'[x]\ny = "{HOSTILE}"\n')
    with open(run / "metrics.jsonl", "a") as metrics:
        metrics.write('{"step": 401, "loss": 2.')
    return run


class Failures(list):
    def check(self, holds, what):
        print(("ok      " if holds else "FAILED  ") + what)
        if not holds:
            self.append(what)


def look(browser, failures, page, name, figures):
    browser.open(page)
    failures.check(browser.value("document.documentElement.dataset.ready") == "true", f"{name}: the script has run")
    count = browser.value("document.querySelectorAll('figure.live').length")
    failures.check(count >= figures, f"{name}: {count} interactive figures, at least {figures}")
    empty = browser.value("Array.from(document.querySelectorAll('figure')).filter(f => !f.querySelector('svg, canvas')).length")
    failures.check(empty == 0, f"{name}: each figure has a picture")
    before = browser.value("document.querySelector('.wide .legend').textContent")
    browser.hover(".wide .chart")
    after = browser.value("document.querySelector('.wide .legend').textContent")
    failures.check(before != after and "step" in after, f"{name}: hovering shows values: {after}")
    browser.value("document.querySelector('.wide .chart').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Home", code="Home", windowsVirtualKeyCode=36)
    keyed = browser.value("document.querySelector('.wide .legend').textContent")
    failures.check(keyed.startswith("step 1") and keyed != after, f"{name}: the keyboard moves along the curve: {keyed}")
    for label in ("Tokens", "Hours", "Linear"):
        browser.value(f"Array.from(document.querySelectorAll('.controls button')).find(b => b.textContent === '{label}').click()")
    browser.value("(() => { const s = document.querySelector('.controls input'); s.value = 0.9; s.dispatchEvent(new Event('input')); })()")
    wide = browser.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    failures.check(wide <= 0, f"{name}: the page is not wider than its window")
    complaints = browser.complaints()
    failures.check(not complaints, f"{name}: no complaint and no request {complaints}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("lockstep")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--pictures", type=pathlib.Path)
    parser.add_argument("--steps", default="400", help="of the longest run")
    arguments = parser.parse_args()
    source = pathlib.Path(__file__).resolve().parents[2]
    lockstep, folder = str(pathlib.Path(arguments.lockstep).resolve()), arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    observed = ["--metrics.sample_tokens", "60", "--train.eval_every", "20", "--train.eval_tokens", "4096"]
    long = train(lockstep, source, folder, "train", ["-n", "2", "--train.steps", arguments.steps, "--optim.warmup", "20", "--train.eval_tokens", "8192", "--train.eval_every", "50",
                                                     "--checkpoint.every", "100", "--metrics.health_every", "10", "--metrics.sample_tokens", "80", "--metrics.sample_prompt", "namespace std {"])
    cube = train(lockstep, source, folder, "dp2-tp2-pp2", ["-n", "8", "--parallel.tp", "2", "--parallel.pp", "2", "--train.global_batch", "32", "--train.steps", "40", "--metrics.health_every", "2", *SMALL, *observed])
    train(lockstep, source, folder, "restarts", ["-n", "2", "--train.steps", "60", "--checkpoint.every", "10", "--run.max_restarts", "2", *SMALL, *observed], fault="rank=1,step=33,action=kill")
    restarts = train(lockstep, source, folder, "restarts", ["-n", "2", "--train.steps", "100"], resume=True, fault="rank=0,step=71,action=kill")
    pages = {name: report(lockstep, runs, folder / f"{name}.html") for name, runs in
             {"train": [long], "cube": [cube], "restarts": [restarts], "two": [cube, restarts], "hostile": [hostile_run(folder, restarts)]}.items()}
    failures = Failures()
    for name, page in pages.items():
        failures.check(page.stat().st_size <= 500_000, f"{name}: {page.stat().st_size} bytes, at most 500000")
    browser = Browser()
    try:
        for name, page in pages.items():
            look(browser, failures, page, name, 6)
            if name == "hostile":
                failures.check(browser.value("typeof window.injected") == "undefined", "hostile: no script of the run has run")
        browser.open(pages["restarts"])
        starts = browser.value("document.querySelectorAll('.event.started').length")
        failures.check(starts == 4, f"restarts: {starts} starts, of two jobs with one restart each")
        browser.open(pages["cube"])
        failures.check(browser.value("document.querySelectorAll('.card.gantt').length") == 2, "cube: the pipeline, measured and simulated")
        browser.hover(".map")
        tip = browser.value("document.querySelector('.map .tip').textContent")
        failures.check(tip.startswith("rank"), f"cube: a value under the pointer: {tip}")
        browser.open(pages["two"])
        legend = browser.value("document.querySelector('.wide .legend').textContent")
        failures.check("dp2-tp2-pp2" in legend and "restarts" in legend, f"two: both runs are in one picture: {legend}")
        differences = browser.value("document.querySelector('#settings table').textContent")
        failures.check("parallel.tp" in differences and "model.hidden" not in differences, "two: the differences of their configurations")
        for name, page in pages.items():
            for kind, width, scheme in (("light", 1280, "light"), ("dark", 1280, "dark"), ("narrow", 400, "light")):
                browser.open(page, width=width, scheme=scheme)
                browser.picture(folder / f"{name}-{kind}.png")
            browser.open(page, width=794)  # of A4
            browser.call("Emulation.setEmulatedMedia", media="print")
            browser.picture(folder / f"{name}-printed.png")
            browser.print_to(folder / f"{name}.pdf")
        if arguments.pictures:
            browser.open(pages["train"], width=1200, height=1000)
            browser.picture(arguments.pictures / "report.png", whole=False)
            browser.open(pages["cube"], width=1200)
            for name, selector in {"report-time": "#time0", "report-ranks": "#ranks0", "report-pipeline": "#pipeline", "report-health": "#health0"}.items():
                box = browser.value(f"(() => {{ const b = document.querySelector('{selector}').getBoundingClientRect(); return {{x: b.x, y: b.y + scrollY, width: b.width, height: b.height}}; }})()")
                browser.picture(arguments.pictures / f"{name}.png", clip=box)
    finally:
        browser.close()
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
