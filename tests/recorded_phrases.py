"""What the documents say of the published steps in sentences, with every number in them computed."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from fathom_eval.offload.weights import SHAPES
from tests.recorded_equal_errors import (
    FIDELITY,
    SMALL,
    below,
    both_ways,
    equal_lines,
    errors_without_the_largest_gain,
    plain_ratio,
    reranked,
    turned,
    wall_ratio,
)
from tests.recorded_names import DOUBLE, DOUBLE_4, EQUAL, FATHOM, LANDMARK, LOKI_4, LONG, PUBLISHED, ROOT, SPARQ, SPARQ_4, THUMBNAIL
from tests.recorded_steps import (
    batched,
    beside,
    best_of_sweep,
    equal_steps,
    in_turn,
    kernel,
    lane,
    lines_of,
    main_table,
    one,
    rate,
    ratio_line,
    ratios_elsewhere,
    records,
    setting,
    span,
    times_fathom,
    unhidden,
)


def phrases() -> dict[str, str]:
    """What the documents say in sentences, by what it is about."""
    main = main_table()
    own, landmark, double = main[FATHOM], main[LANDMARK], main[DOUBLE]
    in_memory = one(LANDMARK, context=LONG, index="hbm")
    spared = unhidden(landmark) - unhidden(own)
    hbm = {label: one(label, context=2**17, index="hbm") for label in (FATHOM, DOUBLE)}
    far = {label: one(label, context=LONG, index="hbm") for label in (FATHOM, DOUBLE)}
    nibble, planes = (kernel(name, "index in HBM", 2**17)["ms"] for name in ("nibble 32 channels", "fathom 48"))
    best = setting("both", 3, 1, 8)
    four, two = setting("both", 4, 1, 8), setting("both", 2, 2, 4)
    plain, gathered, alone = setting("gpu", 4, None, None), setting("both", 4, None, 8), setting("gpu", 1, None, None)
    small, last = lines_of("small-pages.jsonl")[0], one(FATHOM, context=LONG, batch=2)
    link = [own[name] / own["link_gb_s"] / 1e6 for name in ("link_bytes", "rows_bytes")]
    weights = own["weight_bytes"] / own["hbm_gb_s"] / 1e6
    link_rates, memory_rates = ([step[name] for step in records()] for name in ("link_gb_s", "hbm_gb_s"))
    spread = f"{own['wall_ms_p10']:.2f} and {own['wall_ms_p90']:.2f} ms"
    floors = [main[label]["floor_ms"] / own["gpu_ms"] for label in (LANDMARK, THUMBNAIL)]
    swept = [best_of_sweep(name) for name in ("fathom 48", "nibble 32 channels")]
    gathers = [ratio_line(context)["scan rate over gather rate"] for context in (LONG, 2**17)]
    sparq, sparq_wall = (ratios_elsewhere("sparq r=D/8", time) for time in ("gpu_ms", "wall_ms"))
    doubles, owns = ratios_elsewhere(DOUBLE_4), [step["gpu_ms"] for step in equal_steps() if step["label"] == FATHOM]
    many = {(step["batch"], step["label"]): step for step in batched() if step["context"] == LONG}
    threads = [
        abs(step["gpu_ms"] - setting("both", step["lanes"], step["last"], 8)["gpu_ms"])
        for step in lines_of("settings.jsonl")
        if step.get("rows") == "both" and step["threads"] != 8
    ]
    copied = kernel("gather of fathom 48's runs")["of_ceiling"]
    slow_fetch, fast_fetch = rate("small", 8, 0, "runs", "after a scan"), rate("small", 8, 132, "ascending", "after a scan")
    rounds = [own, *(step for step in equal_steps() if step["label"] == FATHOM)]
    return {
        "LINK": f"The link copied {min(link_rates):.1f} to {max(link_rates):.1f} GB/s, the GPU's memory "
        f"{min(memory_rates) / 1e3:.2f} to {max(memory_rates) / 1e3:.2f} TB/s.",
        "APART": f"{own['distinct_layers']} of {own['layers']} layers have buffers of their own",
        "PINNED": f"{own['host_bytes'] / 2**30:.1f} GiB in huge pages, pinned in {own['pin_seconds']:.0f} s and filled in "
        f"{own['fill_seconds']:.0f} s",
        "SPARQ": f"SparQ's target is reached in one comparison of three: {in_turn(main[SPARQ]):.3f} in this round, {sparq[0]:.3f} and "
        f"{sparq[1]:.3f} in another start, with rows by `both` and by the GPU. By wall time it is "
        f"{main[SPARQ]['wall_ms'] / own['wall_ms']:.3f}, {sparq_wall[0]:.3f} and {sparq_wall[1]:.3f}, and reached in none. Fathom's step "
        f"took {own['gpu_ms']:.2f} ms here, its wall time lay between {spread}; there it took {owns[1]:.2f} and {owns[2]:.2f}.",
        "SPARQMANY": f"With two and four sessions in one step at 1M the ratio is {in_turn(many[2, SPARQ]):.3f} and "
        f"{in_turn(many[4, SPARQ]):.3f}.",
        "DOUBLE": f"136 bits took {in_turn(double):.3f} times Fathom's step here, and {doubles[0]:.3f}, {doubles[1]:.3f} and "
        f"{doubles[2]:.3f} times there:",
        "WON": f"Landmark and thumbnail would be at {floors[0]:.2f} and {floors[1]:.2f} times Fathom's measured step if they ran at "
        "their floors.",
        "LANDMARK": f"Its kernels add up to {landmark['parts_ms']['top_k']:.1f} ms against {own['parts_ms']['top_k']:.1f} of "
        f"Fathom's, but to {in_memory['parts_ms']['top_k']:.1f} with the index in HBM and two lanes: they are slow beside the landmark "
        "scan over the link, and most of that is hidden behind it. What neither scan nor GEMM covers is "
        f"{unhidden(landmark):.1f} ms of landmark's step and {unhidden(own):.1f} of Fathom's; were it the same, landmark would be at "
        f"{(landmark['gpu_ms'] - spared) / own['gpu_ms']:.2f} times Fathom instead.",
        "SWEEP": f"planes {planes:.4f} ms and nibbles {nibble:.4f}, {nibble / planes:.2f} times; over a sweep of tilings the best are "
        f"{swept[0]:.4f} and {swept[1]:.4f}, {swept[1] / swept[0]:.2f} times.",
        "HBMSTEP": f"{hbm[FATHOM]['gpu_ms']:.2f} ms against {hbm[DOUBLE]['gpu_ms']:.2f} of double_sparsity at 128k, "
        f"{far[FATHOM]['gpu_ms']:.2f} against {far[DOUBLE]['gpu_ms']:.2f} at 1M.",
        "BEST": f"Three lanes with a last one of one head are the fastest ({best['gpu_ms']:.2f} ms), four with such a last one are "
        f"within noise of them ({four['gpu_ms']:.2f}), two with a last one of two take {two['gpu_ms']:.2f} with four "
        f"threads. Four or sixteen threads instead of eight change a step by {span(threads, 1)} ms.",
        "WAY": f"Fathom's step at 1M takes {own['gpu_ms']:.1f} ms, {own['gpu_ms'] - own['floor_ms']:.1f} more than its floor. Scans run "
        f"for {own['parts_ms']['scan']:.1f} ms, and rows of other lanes cross the link in that time; all bytes of the link, rows "
        f"included, would take {link[0]:.1f} at its copy rate. GEMMs take {own['parts_ms']['gemm']:.1f} where the weights would take "
        f"{weights:.1f}. The other {unhidden(own):.1f} ms are what no scan covers: plan, norms, and top-k, union, rows and attention of "
        "the last lane.",
        "GATHER": f"{gathers[0]:.3f} of it at 1M, {gathers[1]:.3f} at 128k, and that rate is {copied:.3f} of a copy's.",
        "ROWS": f"{own['rows_bytes'] / 1e6:.0f} MB of rows would take {link[1]:.1f} ms at the link's copy rate. The GPU alone fetches "
        f"them in {alone['parts']['rows']:.1f} ms, with one lane.",
        "CPU": f"With four even lanes it took the step from {plain['gpu_ms']:.2f} to {gathered['gpu_ms']:.2f} ms, and with a last lane "
        f"of one head from {setting('gpu', 4, 1, None)['gpu_ms']:.2f} to {four['gpu_ms']:.2f}. For all lanes (`cpu`) it is slower than "
        f"the GPU ({setting('cpu', 4, None, 8)['gpu_ms']:.2f}): the answer for the last lane is waited for.",
        "PIN": f"{last['host_bytes'] / 2**30:.1f} GiB in {last['pin_seconds']:.1f} s, where small ones took "
        f"{small['pin_seconds']:.1f} s for {small['host_bytes'] / 2**30:.1f} GiB.",
        "ORDER": f"from {slow_fetch:.1f} to {fast_fetch:.1f} GB/s after a read",
        "COUNT": f"{len(records())} records",
        "HEADLINE": f"{span(step['gpu_ms'] for step in rounds)} ms for Fathom's 48 bits at 1M tokens on an H200 (Qwen3-8B shape, random "
        f"weights, synthetic K/V), {span(step['floor_ratio'] for step in rounds)} times what the bytes alone would take, and "
        f"{span([times_fathom(double, own), *doubles])} times as fast as a 136-bit scan",
    }


def phrases_of_many() -> dict[str, str]:
    """Contexts, lanes and several sessions."""
    even, last = (one(FATHOM, context=2**19, lanes=lanes) for lanes in (4, 3))
    default, same = (lane(2**19, 1, 3, 1, rows) for rows in ("gpu", "both"))
    far = [one(FATHOM, context=LONG, batch=count) for count in (1, 2, 4)]
    near = [one(FATHOM, context=2**17), *(step for step in batched() if (step["label"], step["context"]) == (FATHOM, 2**17))]
    bad = [one(FATHOM, context=2**17, batch=count, lanes=4) for count in (2, 4)]
    four = lane(2**17, 4, 4, None, "gpu")
    again = [abs(step["gpu_ms"] / one(step["label"], context=LONG, batch=2)["gpu_ms"] - 1) for step in lines_of("again.jsonl")]
    aside = {
        (context, count): [one["wall_ms_a_token"] for one in beside(FATHOM, context, count)]
        for context in (2**17, LONG)
        for count in (2, 4)
    }
    gain = {key: (alone / own, many / own) for key, (own, alone, many) in aside.items()}
    apart = one(DOUBLE, context=2**17, sessions=4)
    profiled = max(step["gpu_ms"] / step["wall_ms"] - 1 for step in records() if step["sessions"] > 1)
    pools = [one(FATHOM, context=context, batch=4, lanes=lanes)["distinct_layers"] for context, lanes in ((2**17, 2), (LONG, 4))]
    losses = {
        context: [
            lane(context, 1, step["lanes"], step["last_lane"], "both")["gpu_ms"] - step["gpu_ms"]
            for step in lines_of("lanes.jsonl")
            if (step["context"], step["batch"], step["rows_by"]) == (context, 1, "gpu") and (context, step["last_lane"]) != (2**19, None)
        ]
        for context in (2**17, 2**18, 2**19)
    }
    two = [lane(2**19, 1, 2, None, rows)["gpu_ms"] for rows in ("gpu", "both")]
    pair = [lane(2**17, 4, 2, None, rows)["gpu_ms"] for rows in ("gpu", "both")]
    fours = [lane(2**19, 1, 4, None, rows)["gpu_ms"] for rows in ("gpu", "both")]
    return {
        "CONTEXT": f"At 512k three lanes, the last of one head, and `both` took {last['gpu_ms']:.1f} ms (wall {last['wall_ms']:.1f}), in a "
        f"later start {same['gpu_ms']:.1f} (wall {same['wall_ms']:.1f}); four even ones took {even['gpu_ms']:.1f} in the first (wall "
        f"{even['wall_ms']:.1f}). Three such lanes with rows by the GPU, the defaults now, took {default['gpu_ms']:.1f} (wall "
        f"{default['wall_ms']:.1f}), the least of all, and were timed for Fathom 48 alone.",
        "BATCH": f"At 128k one session takes {near[0]['gpu_ms']:.1f} ms, two take {near[1]['gpu_ms'] / 2:.1f} each and four "
        f"{near[2]['gpu_ms'] / 4:.1f}; with four lanes, which `auto` takes for four sessions now, {four['gpu_ms'] / 4:.1f} (Fathom "
        "alone). "
        f"With four lanes and `both`, in the first start, two took {bad[0]['gpu_ms'] / 2:.1f} each and four "
        f"{bad[1]['gpu_ms'] / 4:.1f}. At 1M "
        f"two take {far[1]['gpu_ms'] / 2:.1f} ms each and four {far[2]['gpu_ms'] / 4:.1f} against {far[0]['gpu_ms']:.1f} alone.",
        "AGAIN": f"The steps of two sessions at 1M were timed again on the second machine: GPU times agree within "
        f"{100 * max(again):.2f} %.",
        "SIDE": f"At 1M two sessions side by side give {gain[LONG, 2][0]:.2f} times the tokens of one alone and "
        f"{gain[LONG, 2][1]:.2f} times "
        f"those of two in one step, four {gain[LONG, 4][0]:.2f} and {gain[LONG, 4][1]:.2f} times. At 128k two give "
        f"{gain[2**17, 2][0]:.2f} "
        f"times those of one and {gain[2**17, 2][1]:.2f} of one step, four {gain[2**17, 4][0]:.2f} and {gain[2**17, 4][1]:.2f}; one "
        "step of "
        f"four with four lanes comes close, {four['wall_ms_a_token']:.2f} ms a session (wall) against {aside[2**17, 4][0]:.2f}.",
        "SIDEFLOOR": f"four of double_sparsity at 128k take {apart['wall_ms']:.1f} ms where their floors add up to "
        f"{apart['floor_ms']:.1f}.",
        "PROFILED": f"up to {100 * profiled:.0f} % above the wall time",
        "POOL": f"a pool of {pools[0]} layers at 128k and {pools[1]} at 1M",
        "LOSES": f"Below 1M `both` loses: {losses[2**17][0]:.1f} ms at 128k, {span(losses[2**18], 1)} at 256k, "
        f"{span(losses[2**19], 1)} at 512k "
        f"with a small last lane and {fours[1] - fours[0]:.1f} with four even ones. It won twice, with two even lanes: {two[1]:.2f} "
        "ms against "
        f"{two[0]:.2f} at 512k, and {pair[1]:.2f} against {pair[0]:.2f} with four sessions at 128k, where four lanes and rows by the "
        "GPU are "
        f"faster ({four['gpu_ms']:.2f}).",
    }


def phrases_of_equal_errors() -> dict[str, str]:
    lines = equal_lines()
    speed = {key: {basis: float(line["ratio"]) for basis, line in members.items()} for key, members in lines.items()}
    plain = [(length, label) for length in FIDELITY for label in (DOUBLE_4, SPARQ_4, LOKI_4)]
    more = [key for key in lines if key not in plain]
    found = [key for key in more if "klt" in lines[key]]
    both, gpu = ({pair[side]["label"]: pair[side]["gpu_ms"] for pair in both_ways()} for side in (0, 1))
    kept = errors_without_the_largest_gain("90k", SMALL.format(26), DOUBLE_4)
    saved = {label: gpu[label] - both[label] for label in gpu}
    small = [-value for label, value in saved.items() if "basis=klt" in label and "rerank" not in label and "=40" not in label]
    rescored = [-value for label, value in saved.items() if "rerank" in label]
    cost: dict[tuple[bool, float, str, str], list[float]] = {}
    for step, plain_step in reranked():
        key = (step["method"] == "fathom", step["rerank"], step["rows_by"], step["round"])
        cost.setdefault(key, []).append(step["wall_ms"] - plain_step["wall_ms"])
    first, second = dict.fromkeys(step["round"] for step in equal_steps())
    earlier = {step["label"]: step for step in records() if step["rerank"] == 2}
    own, without = earlier[f"{FATHOM} rerank=2.0"], setting("gpu", 4, None, None)
    apart = {
        rows: max(abs(step["gpu_ms"] / step["wall_ms"] - 1) for step in equal_steps() if step["rows_by"] == rows)
        for rows in ("both", "gpu")
    }
    pairs = turned()
    starts = [[step for step in equal_steps() if step["round"] == start] for start in (first, second)]
    kept_steps = lines_of("records.jsonl.gz", EQUAL)
    again = len(starts[0]) - sum(step["round"] == first for step in kept_steps)
    shape = SHAPES["qwen3-8b-shape"]
    bases = 4 * shape.layers * shape.kv_heads * shape.head_dim**2
    # The weights of both runs are the same: no record counts the bases.
    assert {step["weight_bytes"] for step in (*equal_steps(), *records())} == {records()[0]["weight_bytes"]}
    sizes = [(steps[0]["distinct_layers"], steps[0]["host_bytes"] / 2**30) for steps in starts]
    return {
        "BASES": f"leave the {bases / 1e6:.1f} MB of these matrices that a step reads out",
        "EQUALCOUNT": f"{len(kept_steps)} records",
        "EQUALFIRST": f"all {len(starts[0])} records of the first start, {again} of which were timed again",
        "EQUALAPART": f"In the first {sizes[0][0]} of {starts[0][0]['layers']} layers have buffers of their own ({sizes[0][1]:.1f} GiB)",
        "EQUALAPART2": f"In the second {sizes[1][0]} have ({sizes[1][1]:.1f} GiB)",
        "REACHED": f"The aim of three times is reached against double_sparsity, {speed['90k', DOUBLE_4]['klt']:.2f} at the errors of "
        "90k and "
        f"{speed['32k', DOUBLE_4]['klt']:.2f} at those of 32k, and against Loki at 32k, {speed['32k', LOKI_4]['klt']:.2f}.",
        "MISSED": f"It is missed against SparQ, {speed['90k', SPARQ_4]['klt']:.2f} and {speed['32k', SPARQ_4]['klt']:.2f}, against Loki at "
        f"90k, {speed['90k', LOKI_4]['klt']:.2f}, and wherever the reference has union or rerank too: of {len(more)} such pairs Fathom in "
        f"a basis reaches {len(found)}, at {span(speed[key]['klt'] for key in found)} (by wall time "
        f"{span(wall_ratio(lines[key]['klt']) for key in found)}).",
        "CLOSE": f"The mean error of budget 26 is below the reference's in {below('90k', SMALL.format(26), DOUBLE_4)} windows; "
        "without the one "
        f"that speaks for it most, the means are {kept[0]:.3f} and {kept[1]:.3f}. Budget 28 is below in "
        f"{below('90k', SMALL.format(28), DOUBLE_4)} and gives {gpu[DOUBLE_4] / gpu[SMALL.format(28)]:.2f} times. With rows by `both` "
        "budget "
        f"26 gives {both[DOUBLE_4] / both[SMALL.format(26)]:.2f}. At 32k budget 24 is below in "
        f"{below('32k', SMALL.format(24), DOUBLE_4)}.",
        "OWN": f"Where its heads attend to their own winners alone and nothing is rescored, it is {plain_ratio('90k', DOUBLE_4):.2f} "
        "times as "
        f"fast as double_sparsity, {plain_ratio('90k', LOKI_4):.2f} as Loki and {plain_ratio('90k', SPARQ_4):.2f} as SparQ, at either "
        "length.",
        "UNREACHED": f"{sum(not members for members in lines.values())} of {len(lines)} pairs of errors and reference are left out, "
        "since no timed budget reaches their error:",
        "RAWSPEED": f"In the model's own channels it is {speed['90k', DOUBLE_4]['raw']:.2f} and {speed['32k', DOUBLE_4]['raw']:.2f} "
        "times as "
        "fast as double_sparsity.",
        "TURNED": f"In {len(pairs)} pairs of the first start GEMMs take {span((gemm for gemm, _ in pairs), 1)} ms more in a basis, "
        "and the "
        f"wall time differs by {span((wall for _, wall in pairs), 1).replace('-', '−')} ms.",
        "NOISE": f"differ by up to {100 * apart['both']:.1f} % with rows by `both` and {100 * apart['gpu']:.1f} % with rows by the GPU",
        "RERANKCOST": f"1.5 times k costs small budgets {span(cost[True, 1.5, 'gpu', second], 1)} ms of wall time with rows by the "
        "GPU and "
        f"{span(cost[True, 1.5, 'both', second], 1)} with `both`; budget 32 {cost[True, 1.5, 'both', first][0]:.1f}. Twice k costs "
        f"{span(cost[True, 2, 'both', first], 1)}. The 136-bit scans hide more of it: {cost[False, 1.5, 'both', first][0]:.1f} ms for "
        "1.5 "
        f"times, {span(cost[False, 2, 'both', first], 1)} for twice k.",
        "RERANKGPU": f"Twice k with rows by the GPU and four even lanes, in the run above, took {own['gpu_ms']:.1f} ms with Fathom 48, "
        f"{own['gpu_ms'] - without['gpu_ms']:.1f} more than without in another process, and "
        f"{earlier[f'{DOUBLE} rerank=2.0']['gpu_ms']:.1f} with double_sparsity.",
        "SAVED": f"It saves at most {max(saved.values()):.1f} ms (SparQ of an eighth of the channels), {saved[FATHOM]:.1f} for Fathom "
        "48 and "
        f"{saved[SMALL.format(40)]:.1f} for budget 40; with 136 bits it makes "
        f"{span((-saved[label] for label in (DOUBLE_4, SPARQ_4, LOKI_4)), 1)} "
        f"ms more, with smaller budgets {span(small, 1)}, and with rerank {span(rescored, 1)}.",
    }


def phrases_of_checks() -> dict[str, str]:
    """What was checked beside the times."""
    suite = ElementTree.parse(PUBLISHED / "model-control.xml").getroot()[0]
    cases = [case.attrib["name"].split("[")[1] for case in suite if not len(case)]
    assert len(cases) == len(suite)
    methods_of = {re.sub(r"-(host-1-gpu|host-3-both|hbm-1-gpu)\]$", "", case) for case in cases}
    ranked = re.search(r"\nRANKED = 2\*\*(\d+)\n", (ROOT / "kernels/topk/triton.py").read_text(encoding="utf-8"))
    tokens = re.findall(r'"tokens": \[2\*\*(\d+)', (ROOT / "tests/kernels/kernel_checks/selection.py").read_text(encoding="utf-8"))
    assert ranked is not None
    blocks = 2 ** int(ranked[1])
    return {
        "MODEL": f"SmolLM2 in fp32 on an H200 gave the evaluator's tokens in {len(cases)} of {len(suite)} cases: {len(methods_of)} "
        "methods,",
        "TOPK": f"Beyond {blocks:,} blocks ({blocks * 64 >> 20}M tokens) it failed to launch on the H200; a second kernel now ranks "
        "more than "
        f"that in pieces, checked on the GPU to {2 ** max(map(int, tokens)) >> 20}M tokens.",
    }


def all_phrases() -> dict[str, str]:
    return {**phrases(), **phrases_of_many(), **phrases_of_equal_errors(), **phrases_of_checks()}
