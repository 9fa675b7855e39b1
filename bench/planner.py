#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Error of `lockstep plan time` on published measurements.

    python3 bench/planner.py BIN_DIR DATA_FOLDER [--json] [--check]

BIN_DIR has the command lockstep, DATA_FOLDER the CSV files that docs/planning.md describes. Every data set is a
cluster description with at most six constants, which are fitted on its rows and printed. The predictions are those of
the command. --check also fits on one half of the rows, and on the smaller clusters only, and tests the others.
"""
import csv
import json
import math
import os
import random
import subprocess
import sys
import tempfile

BASE = ["--train.dtype", "bfloat16", "--data.path", "any", "--parallel.order", "tp_fastest", "--train.device", "cuda"]


def read(folder, name):
    with open(os.path.join(folder, name), newline="") as file:
        return list(csv.DictReader(file))


def mean(values):
    return sum(values) / len(values)


def median(values):
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def least(start, score):
    """Values with the lowest score: `score` takes a list of candidates. Samples around the best of the last round."""
    names = list(start)
    numbers = random.Random(1)
    center = [math.log(start[name]) for name in names]
    spread = [0.3] * len(names)
    best = (math.inf, center)
    for _ in range(36):
        points = [best[1]]
        points += [[numbers.gauss(*each) for each in zip(center, spread)] for _ in range(27)]
        candidates = [{name: math.exp(value) for name, value in zip(names, point)} for point in points]
        scored = sorted(zip(score(candidates), points))
        best = min(best, scored[0])
        elite = [point for _, point in scored[:7]]
        center = [mean([point[k] for point in elite]) for k in range(len(names))]
        for k in range(len(names)):
            deviation = math.sqrt(mean([(point[k] - center[k]) ** 2 for point in elite]))
            spread[k] = 0.4 * spread[k] + 0.6 * max(1e-3, 1.3 * deviation)
    return {name: math.exp(value) for name, value in zip(names, best[1])}


class Planner:
    """Rows of options, which the command times on clusters."""

    def __init__(self, command, rows, settings, tables=()):
        self.command, self.settings = command, dict(settings)
        self.folder = tempfile.TemporaryDirectory(prefix="planner-")
        self.rows = self.path("rows.csv")
        names = sorted({name for row in rows for name in row})
        with open(self.rows, "w") as file:
            file.write(",".join(names) + "\n")
            for row in rows:
                file.write(",".join(str(row.get(name, "")) for name in names) + "\n")
        if tables:
            with open(self.path("collectives.csv"), "w") as file:
                file.write("op,hosts,ranks,bytes,seconds\n")
                file.writelines(",".join(str(cell) for cell in table) + "\n" for table in tables)
            self.settings["cluster.collectives"] = "collectives.csv"

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def cluster(self, constants, number):
        sections = {}
        for name, value in {**self.settings, **constants}.items():
            section, key = name.split(".")
            text = json.dumps(value) if isinstance(value, (str, bool)) else repr(float(value))
            sections.setdefault(section, []).append(f"{key} = {text}\n")
        with open(self.path(f"cluster-{number}.toml"), "w") as file:
            for section, lines in sections.items():
                file.write(f"[{section}]\n" + "".join(lines))
        return file.name

    def run(self, candidates, options=()):
        command = [self.command, "plan", "time", "--rows", self.rows, *BASE, *options]
        for number, constants in enumerate(candidates):
            command += ["--cluster", self.cluster(constants, number)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return list(csv.DictReader(out.splitlines()))

    def times(self, candidates, options=()):
        """Seconds of every row for every set of constants."""
        lines = self.run(candidates, options)
        refused = {line["refused"] for line in lines if line["refused"]}
        if refused:
            sys.exit(f"rows that the trainer refuses: {sorted(refused)}")
        return [[float(line[f"step_ms_{i}"]) / 1e3 for line in lines] for i in range(len(candidates))]

    def fit(self, start, measured, rows=None):
        """Constants with the least mean |log(predicted / measured)| of the rows."""
        rows = range(len(measured)) if rows is None else rows

        def score(candidates):
            times = self.times(candidates, ["--estimate"])
            return [mean([abs(math.log(each[i] / measured[i])) for i in rows]) for each in times]

        return least(start, score)


def errors_of(predicted, measured, rows=None):
    rows = range(len(measured)) if rows is None else rows
    errors = [abs(predicted[i] / measured[i] - 1) for i in rows]
    return {
        "rows": len(errors),
        "mean_percent": round(100 * mean(errors), 2),
        "median_percent": round(100 * median(errors), 2),
        "within_10_percent": round(100 * mean([error <= 0.1 for error in errors]), 1),
    }


def choices(cells, measured, rank):
    """Of each cell: measured speed of what is predicted best, and of the best of the first three, in parts."""
    first, three = [], []
    for rows in cells:
        best = min(measured[i] for i in rows)
        order = sorted(rows, key=rank)
        first.append(best / measured[order[0]])
        three.append(max(best / measured[i] for i in order[:3]))
    return {
        "cells": len(first),
        "first_mean": round(mean(first), 4),
        "first_worst": round(min(first), 4),
        "three_mean": round(mean(three), 4),
        "three_worst": round(min(three), 4),
    }


def checked(planner, start, measured, small, large):
    """Errors on rows that the constants were not fitted on."""
    out = {}
    even, odd = ([i for i in sorted(small + large) if i % 2 == part] for part in (0, 1))
    for name, fitted, tested in (
        ("even rows fitted, odd rows tested", even, odd),
        ("odd rows fitted, even rows tested", odd, even),
        ("smaller clusters fitted, larger tested", small, large),
    ):
        times = planner.times([planner.fit(start, measured, fitted)])[0]
        out[name] = errors_of(times, measured, tested)
    return out


def halves(rows, column, most):
    small = [i for i, row in enumerate(rows) if int(row[column]) <= most]
    return small, [i for i in range(len(rows)) if i not in set(small)]


# ---- nanotron: 1F1B, tensor parallelism with sequence parallelism, ZeRO-0 and 1 ----

NANOTRON = {
    "cluster.base": "h100",
    "efficiency.attention": 0.25,
    "efficiency.memory": 0.8,
    "links.host_latency": 2e-5,
    "links.network_latency": 45e-6,
    "links.sharing": 0.5,
    "links.host_bandwidth": 436e9,
    "software.gradient_bytes": 4,
    "software.accumulate_bytes": 12,
    "software.optimizer_bytes": 44,
    "software.overlap_scatter": False,
    "software.regather": True,
}
NANOTRON_START = {
    "efficiency.product": 0.53,
    "efficiency.launch": 1.3e-3,
    "efficiency.step": 0.06,
    "links.reduce_factor": 1.1,
    "links.gather_factor": 1.45,
    "software.pipeline_launch": 0.72e-3,
}


MEMORY_LIMIT = 70 * 2**30
RISK = 1.1  # as plan layout ranks layouts that leave less than a tenth of the memory


def nanotron_stages(row):
    """Layers of each stage as nanotron cuts them; embedding and head count as one each."""
    hidden, layers, stages = int(row["hidden"]), int(row["layers"]), int(row["pp"])
    block = 4 * hidden * hidden + 3 * hidden * int(row["ffn"])
    whole = layers * block + int(row["vocab"]) * hidden
    counts, stage, running = [0] * stages, 0, 0
    for _ in range(layers):
        counts[stage] += 1
        running += block
        if running > (stage + 1) / stages * whole and stage < stages - 1:
            stage += 1
    # The trainer has no stages without a layer: those that the head leaves empty take one of a stage with several,
    # or, where there are more stages than layers, one that the model does not have.
    for empty in (stage for stage in range(1, stages - 1) if counts[stage] == 0):
        donors = [stage for stage in range(stages) if counts[stage] > 1]
        if donors:
            counts[donors[-1]] -= 1
        counts[empty] += 1
    counts[0] += 1
    counts[-1] += 1
    return counts


def nanotron_options(row):
    options = {
        "model.kind": "llama",
        "model.layers": row["layers"],
        "model.hidden": row["hidden"],
        "model.heads": row["heads"],
        "model.kv_heads": row["kv_heads"],
        "model.ffn": row["ffn"],
        "model.vocab": row["vocab"],
        "model.tied": "true" if row["tied_embeddings"] == "1" else "false",
        "train.seq_len": row["seq_tokens"],
        "train.micro_batch": row["micro_batch_seqs"],
        "train.global_batch": row["global_batch_seqs"],
        "parallel.dp": row["dp"],
        "parallel.tp": row["tp"],
        "parallel.pp": row["pp"],
        "parallel.shard": "optimizer" if row["zero_stage"] == "1" and row["dp"] != "1" else "none",
    }
    if int(row["tp"]) > 1:
        options["parallel.sequence_parallel"] = "true"
    if int(row["pp"]) > 1:
        counts = nanotron_stages(row)
        options["parallel.split"] = " ".join(str(count) for count in counts)
        options["model.layers"] = sum(counts) - 2
    return options


def bus_seconds(row):
    """Of 1 GiB, from the published bus bandwidth."""
    gpus = int(row["gpus"])
    factor = (gpus - 1) / gpus * (2 if row["collective"] == "all_reduce" else 1)
    return 2**30 * factor / (float(row["busbw_gb_per_s_middle"]) * 1e9)


# Memory is that of rank 0: states are 20 bytes a parameter, of which ZeRO-1 shares 12. Lockstep's prediction gives
# parameters and activations of the first stage; four constants say how nanotron differs.
MEMORY_START = {"activations": 1.4, "bytes per logit": 8.0, "gathered inputs per layer": 1.0, "fixed GiB": 0.2}


def nanotron_memory(row, planned, constants):
    """Bytes of rank 0."""
    dp, tp, pp = int(row["dp"]), int(row["tp"]), int(row["pp"])
    tokens = int(row["micro_batch_seqs"]) * int(row["seq_tokens"])
    state = int(planned["parameters"]) / 2 * (8 + 12 / dp if row["zero_stage"] == "1" else 20)
    total = state + constants["activations"] * int(planned["activations"]) + constants["fixed GiB"] * 2**30
    if pp == 1:  # rank 0 has the head too
        total += constants["bytes per logit"] * tokens * int(row["vocab"]) / tp
        gathered = 2 * tokens * int(row["hidden"]) * int(row["layers"]) * (1 - 1 / tp)
        total += constants["gathered inputs per layer"] * gathered
    return total


def plan_memory(command, rows):
    return Planner(command, [nanotron_options(row) for row in rows], NANOTRON).run([NANOTRON_START], ["--memory"])


def complete(row):
    return int(row["dp"]) * int(row["micro_batch_seqs"]) * int(row["grad_accum"]) == int(row["global_batch_seqs"])


def refusals(command, folder):
    """Memory of the measured configurations, and whether those that failed would have been refused."""
    measured = [row for row in read(folder, "nanotron_h100.csv") if row["flag"] != "batch_mismatch"]
    planned = plan_memory(command, measured)
    used = [float(row["memory_gib_rank0"]) * 2**30 for row in measured]

    def score(candidates):
        return [
            mean([abs(math.log(nanotron_memory(*each, constants) / bytes)) for *each, bytes in zip(measured, planned, used)])
            for constants in candidates
        ]

    constants = least(MEMORY_START, score)
    predicted = [nanotron_memory(*each, constants) for each in zip(measured, planned)]
    failed = [row for row in read(folder, "nanotron_h100_failed.csv") if row["also_measured"] == "0" and complete(row)]
    failed = [row for row in failed if int(row["grad_accum"]) >= int(row["pp"]) - 1]  # 1F1B of nanotron refuses the others
    would = [nanotron_memory(*each, constants) for each in zip(failed, plan_memory(command, failed))]
    return constants, {
        "constants": constants,
        "error": errors_of(predicted, used),
        "limit_gib": MEMORY_LIMIT / 2**30,
        "failed_rows": len(failed),
        "failed_refused_percent": round(100 * mean([bytes > MEMORY_LIMIT for bytes in would]), 1),
        "measured_refused_percent": round(100 * mean([bytes > MEMORY_LIMIT for bytes in predicted]), 1),
    }


def nanotron(command, folder, check):
    rows = [row for row in read(folder, "nanotron_h100.csv") if row["flag"] == "ok"]
    measured = [float(row["step_time_s"]) for row in rows]
    tables = [
        (row["collective"], row["nodes"], row["gpus"], 2**30, bus_seconds(row))
        for row in read(folder, "nanotron_cluster_bandwidth.csv")
    ]
    planner = Planner(command, [nanotron_options(row) for row in rows], NANOTRON, tables)
    small, _ = halves(rows, "nodes", 32)
    constants = planner.fit(NANOTRON_START, measured, small)
    times = planner.times([constants])[0]
    cells = {}
    for i in small:
        cells.setdefault((rows[i]["model"], rows[i]["nodes"]), []).append(i)
    near = [i for cell in cells.values() for i in cell if measured[i] <= 2 * min(measured[j] for j in cell)]
    memory_constants, memory = refusals(command, folder)
    bytes = [nanotron_memory(*each, memory_constants) for each in zip(rows, plan_memory(command, rows))]
    # Configurations that fill the memory are sometimes two or three times slower: the allocator retries.
    risk = [RISK if each > MEMORY_LIMIT else 1 for each in bytes]
    result = {
        "constants": constants,
        "memory": memory,
        "all": errors_of(times, measured),
        "up to 32 nodes": errors_of(times, measured, small),
        "within twice the best of the cell": errors_of(times, measured, near),
        "choice": choices(cells.values(), measured, lambda i: times[i] * risk[i]),
        "choice by time alone": choices(cells.values(), measured, lambda i: times[i]),
    }
    for key in ("nodes", "tp", "pp"):
        result["by " + key] = {
            value: errors_of(times, measured, [i for i in small if rows[i][key] == value])
            for value in sorted({rows[i][key] for i in small}, key=int)
        }
    if check:
        few = [i for i in small if int(rows[i]["nodes"]) <= 8]
        many = [i for i in small if int(rows[i]["nodes"]) > 8]
        result["checks"] = checked(planner, NANOTRON_START, measured, few, many)
    return result


# ---- llm-foundry: fully sharded ----

FSDP = {
    "h100": {
        "efficiency.product": 0.75,
        "efficiency.attention": 0.18,
        "efficiency.memory": 0.45,
        "efficiency.launch": 0.5e-3,
        "links.network_bandwidth": 200e9,
        "software.slowdown": 0.5,
    },
    "a100": {
        "efficiency.product": 0.82,
        "efficiency.attention": 0.32,
        "efficiency.memory": 0.6,
        "efficiency.launch": 0.4e-3,
        "links.network_bandwidth": 130e9,
        "software.slowdown": 0.5,
    },
}


def fsdp_options(row):
    return {
        "model.kind": "gpt",
        "model.layers": row["layers"],
        "model.hidden": row["hidden"],
        "model.heads": row["heads"],
        "model.ffn": row["ffn"],
        "model.vocab": row["vocab"],
        "train.seq_len": row["seq_tokens"],
        "train.micro_batch": row["micro_batch_seqs"],
        "train.global_batch": row["global_batch_seqs"],
        "train.recompute": "full" if row["recompute_full"] == "1" else "none",
        "parallel.dp": row["gpus"],
        "parallel.shard": "full" if row["shard"] == "FULL_SHARD" else "grad_op",
    }


def fsdp(command, folder, gpu, check):
    rows = [
        row
        for row in read(folder, "llm_foundry_fsdp.csv")
        if row["flag"] == "ok" and row["gpu"].startswith(gpu) and "fp8" not in row["table"]
    ]
    measured = [float(row["step_time_s"]) for row in rows]
    settings = {
        "cluster.base": gpu,
        "software.gradient_bytes": 4,
        "software.reduce_each": True,
        "software.optimizer_bytes": 44,
    }
    planner = Planner(command, [fsdp_options(row) for row in rows], settings)
    constants = planner.fit(FSDP[gpu], measured)
    result = {"constants": constants, "all": errors_of(planner.times([constants])[0], measured)}
    if check:
        small, large = halves(rows, "gpus", median([int(row["gpus"]) for row in rows]))
        result["checks"] = checked(planner, FSDP[gpu], measured, small, large)
    return result


# ---- vTrain's measurements of Megatron-DeepSpeed: 1F1B, full recomputation, nothing overlapped ----

VTRAIN = {
    "cluster.base": "a100",
    "efficiency.product_half": 2e10,
    "efficiency.memory": 0.8,
    "links.sharing": 1,
    "software.overlap": 0,
    "software.logit_bytes": 20,
    "software.score_bytes": 12,
    "software.scatter_messages": True,
}
VTRAIN_START = {
    "efficiency.product": 0.77,
    "efficiency.launch": 2.2e-3,
    "efficiency.step": 0.2,
    "links.network_bandwidth": 86e9,
    "links.reduce_factor": 1.0,
}


def vtrain_options(row):
    return {
        "model.kind": "gpt",
        "model.layers": row["layers"],
        "model.hidden": row["hidden"],
        "model.heads": row["heads"],
        "model.vocab": 51200,
        "train.seq_len": row["seq_tokens"],
        "train.micro_batch": row["micro_batch_seqs"],
        "train.global_batch": row["global_batch_seqs"],
        "train.recompute": "full",
        "parallel.dp": row["dp"],
        "parallel.tp": row["tp"],
        "parallel.pp": row["pp"],
    }


def vtrain(command, folder, check):
    rows = read(folder, "vtrain_multi_node_a100.csv")
    measured = [float(row["step_time_ms"]) / 1e3 for row in rows]
    sizes = {1 << power for power in range(20, 31)}
    tables = [
        ("all_reduce", 1, row["gpus"], row["bytes"], float(row["time_us_out_of_place"]) / 1e6)
        for row in read(folder, "a100_all_reduce.csv")
        if int(row["bytes"]) in sizes and row["gpus"] in ("2", "4", "8")
    ]
    planner = Planner(command, [vtrain_options(row) for row in rows], VTRAIN, tables)
    constants = planner.fit(VTRAIN_START, measured)
    times = planner.times([constants])[0]
    cells = {}
    for i, row in enumerate(rows):
        cells.setdefault(row["params_1e9"], []).append(i)
    result = {
        "constants": constants,
        "all": errors_of(times, measured),
        "choice": choices(cells.values(), measured, lambda i: times[i]),
        "by model": {model: errors_of(times, measured, cell) for model, cell in cells.items()},
    }
    if check:
        result["checks"] = checked(planner, VTRAIN_START, measured, *halves(rows, "gpus", 256))
    return result


def main():
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    if len(words) != 2:
        sys.exit(__doc__)
    command, folder = os.path.join(words[0], "lockstep"), words[1]
    check = "--check" in sys.argv
    results = {
        "fully sharded H100": fsdp(command, folder, "h100", check),
        "fully sharded A100": fsdp(command, folder, "a100", check),
        "vTrain A100": vtrain(command, folder, check),
        "nanotron H100": nanotron(command, folder, check),
    }
    if "--json" in sys.argv:
        print(json.dumps(results, indent=2))
        return
    for name, result in results.items():
        print(name)
        for key, value in result.items():
            print(f"  {key}: {value}")


if __name__ == "__main__":
    main()
