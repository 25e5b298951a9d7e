"""What the documents say of the published steps in sentences, with every number in them computed."""

from __future__ import annotations

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
from tests.recorded_evaluation import phrases_of_checks, phrases_of_evaluations
from tests.recorded_fetches import rate
from tests.recorded_names import (
    DOUBLE,
    DOUBLE_4,
    EQUAL,
    FATHOM,
    LANDMARK,
    LOKI_4,
    LONG,
    SPARQ,
    SPARQ_4,
    THUMBNAIL,
)
from tests.recorded_pacing import phrases_of_pacing, unpaced
from tests.recorded_steps import (
    again,
    batched,
    beside,
    best_of_sweep,
    equal_steps,
    in_turn,
    kernel,
    lane,
    lines_of,
    main_table,
    of_many,
    one,
    other_rounds,
    paced,
    paced_equal,
    ratio_line,
    ratios,
    ratios_elsewhere,
    records,
    setting,
    span,
    times_fathom,
    unhidden,
)


def phrases() -> dict[str, str]:
    """What the documents say in sentences, by what it is about."""
    main, before = main_table(), main_table(records())
    own, landmark, double = main[FATHOM], main[LANDMARK], main[DOUBLE]
    earlier = before[FATHOM]
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
    link_rates, memory_rates = ([step[name] for step in paced()] for name in ("link_gb_s", "hbm_gb_s"))
    floors = [main[label]["floor_ms"] / own["gpu_ms"] for label in (LANDMARK, THUMBNAIL)]
    swept = [best_of_sweep(name) for name in ("fathom 48", "nibble 32 channels")]
    gathers = [ratio_line(context)["scan rate over gather rate"] for context in (LONG, 2**17)]
    sparq, sparq_wall = (ratios([SPARQ], time) for time in ("gpu_ms", "wall_ms"))
    doubles = ratios([DOUBLE, DOUBLE_4])
    owns = [step["gpu_ms"] for step in other_rounds() if step["label"] == FATHOM]
    sparq_before = [in_turn(before[SPARQ]), *ratios_elsewhere("sparq r=D/8")]
    doubles_before = [in_turn(before[DOUBLE]), *ratios_elsewhere(DOUBLE_4)]
    many = {(step["batch"], step["label"]): step for step in batched() if step["context"] == LONG}
    threads = [
        abs(step["gpu_ms"] - setting("both", step["lanes"], step["last"], 8)["gpu_ms"])
        for step in lines_of("settings.jsonl")
        if step.get("rows") == "both" and step["threads"] != 8
    ]
    old_link, old_memory = ([step[name] for step in records()] for name in ("link_gb_s", "hbm_gb_s"))
    copied = kernel("gather of fathom 48's runs")["of_ceiling"]
    slow_fetch, fast_fetch = rate("small", 8, 0, "runs", "after a scan"), rate("small", 8, 132, "ascending", "after a scan")
    rounds = [own, *(step for step in other_rounds() if step["label"] == FATHOM)]
    swift = unpaced(LANDMARK)
    return {
        "LINK": f"The link copied {min(link_rates):.1f} to {max(link_rates):.1f} GB/s, the GPU's memory "
        f"{min(memory_rates) / 1e3:.2f} to {max(memory_rates) / 1e3:.2f} TB/s.",
        "APART": f"{own['distinct_layers']} of {own['layers']} layers have buffers of their own",
        "PINNED": f"{own['host_bytes'] / 2**30:.1f} GiB in huge pages, pinned in {own['pin_seconds']:.0f} s and filled in "
        f"{own['fill_seconds']:.0f} s",
        "SPARQ": f"SparQ's target is reached in each of three rounds: {in_turn(main[SPARQ]):.3f} here, {sparq[0]:.3f} and "
        f"{sparq[1]:.3f} in "
        f"two other starts; by wall time {main[SPARQ]['wall_ms'] / own['wall_ms']:.3f}, {sparq_wall[0]:.3f} and {sparq_wall[1]:.3f}. "
        f"Fathom's step took {own['gpu_ms']:.2f}, {owns[0]:.2f} and {owns[1]:.2f} ms.",
        "BEFORE": f"Before rows were paced, on two other machines, SparQ's ratio was {sparq_before[0]:.3f}, {sparq_before[1]:.3f} and "
        f"{sparq_before[2]:.3f}, that of 136 bits {span(doubles_before, 3)}, and Fathom's step, with {earlier['distinct_layers']} of "
        f"{earlier['layers']} layers apart and rows by `both`, {earlier['gpu_ms']:.2f} ms.",
        "SPARQMANY": f"With two and four sessions in one step at 1M the ratio is {in_turn(many[2, SPARQ]):.3f} and "
        f"{in_turn(many[4, SPARQ]):.3f}.",
        "DOUBLE": f"136 bits took {in_turn(double):.3f} times Fathom's step here, and {doubles[0]:.3f} and {doubles[1]:.3f} times there:",
        "WON": f"Landmark and thumbnail would be at {floors[0]:.2f} and {floors[1]:.2f} times Fathom's measured step if they ran at "
        "their floors.",
        "LANDMARK": f"Its kernels add up to {landmark['parts_ms']['top_k']:.1f} ms against {own['parts_ms']['top_k']:.1f} of "
        f"Fathom's, but to {in_memory['parts_ms']['top_k']:.1f} with the index in HBM and two lanes: they are slow beside the landmark "
        "scan over the link, and most of that is hidden behind it. What neither scan nor GEMM covers is "
        f"{unhidden(landmark):.1f} ms of landmark's step and {unhidden(own):.1f} of Fathom's; were it the same, landmark would be at "
        f"{(landmark['gpu_ms'] - spared) / own['gpu_ms']:.2f} times Fathom instead.",
        "LANDMARKUNPACED": f"unpaced, as it is now, in another start, landmark's step took {swift['gpu_ms']:.2f} ms (wall "
        f"{swift['wall_ms']:.2f}), "
        f"of which neither covers {unhidden(swift):.1f}; with that it would be at {swift['gpu_ms'] / own['gpu_ms']:.2f} times Fathom.",
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
        "PACEDCOUNT": f"{len(paced())} records",
        "BEFORELINK": f"The link copied {min(old_link):.1f} to {max(old_link):.1f} GB/s, the GPU's memory {min(old_memory) / 1e3:.2f} to "
        f"{max(old_memory) / 1e3:.2f} TB/s.",
        "BEFOREAPART": f"{earlier['distinct_layers']} of {earlier['layers']} layers have buffers of their own",
        "BEFOREPINNED": f"{earlier['host_bytes'] / 2**30:.1f} GiB in huge pages, pinned in {earlier['pin_seconds']:.0f} s and filled in "
        f"{earlier['fill_seconds']:.0f} s",
        "HEADLINE": f"{span(step['gpu_ms'] for step in rounds)} ms for Fathom's 48 bits at 1M tokens on an H200 (Qwen3-8B shape, random "
        f"weights, synthetic K/V), {span(step['floor_ratio'] for step in rounds)} times what the bytes alone would take, and "
        f"{span([times_fathom(double, own), *doubles])} times as fast as a 136-bit scan",
    }


def phrases_of_many() -> dict[str, str]:
    """Contexts, lanes and several sessions."""
    even, last = (one(FATHOM, context=2**19, lanes=lanes) for lanes in (4, 3))
    default, same = (lane(2**19, 1, 3, 1, rows) for rows in ("gpu", "both"))
    far = [one(FATHOM, again(), context=LONG), *(one(FATHOM, paced(), context=LONG, batch=count) for count in (2, 4))]
    old = [one(FATHOM, context=LONG, batch=count) for count in (2, 4)]
    side = {(label, count): one(label, context=LONG, sessions=count)["wall_ms"] for label in (FATHOM, SPARQ, DOUBLE) for count in (2, 4)}
    near = [one(FATHOM, context=2**17), *(step for step in batched() if (step["label"], step["context"]) == (FATHOM, 2**17))]
    four = lane(2**17, 4, 4, None, "gpu")
    aside = {
        (context, count): [one["wall_ms_a_token"] for one in beside(FATHOM, context, count)]
        for context in (2**17, LONG)
        for count in (2, 4)
    }
    gain = {key: (alone / own, many / own) for key, (own, alone, many) in aside.items()}
    apart = one(DOUBLE, context=2**17, sessions=4)
    profiled = max(step["gpu_ms"] / step["wall_ms"] - 1 for step in of_many())
    pools = [
        one(FATHOM, of, context=context, batch=4, lanes=lanes)["distinct_layers"]
        for of, context, lanes in ((records(), 2**17, 2), (paced(), LONG, 4))
    ]
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
        "CONTEXT": f"At 512k, before rows were paced, three lanes, the last of one head, took {default['gpu_ms']:.1f} ms (wall "
        f"{default['wall_ms']:.1f}), with `both` {same['gpu_ms']:.1f} (wall {same['wall_ms']:.1f}) and in an earlier start "
        f"{last['gpu_ms']:.1f}; four even ones with `both` {even['gpu_ms']:.1f} (wall {even['wall_ms']:.1f}).",
        "BATCH": f"At 128k, in the earlier run, one session took {near[0]['gpu_ms']:.1f} ms, two {near[1]['gpu_ms'] / 2:.1f} each and "
        f"four {near[2]['gpu_ms'] / 4:.1f}; with four lanes, which `auto` takes for four sessions now, {four['gpu_ms'] / 4:.1f} (Fathom "
        f"alone). At 1M two take {far[1]['gpu_ms'] / 2:.1f} ms each and four {far[2]['gpu_ms'] / 4:.1f} against {far[0]['gpu_ms']:.1f} "
        f"alone; before, with `both`, two took {old[0]['gpu_ms'] / 2:.1f} and four {old[1]['gpu_ms'] / 4:.1f}.",
        "SIDE": f"At 1M two sessions side by side give {gain[LONG, 2][0]:.2f} times the tokens of one alone and {gain[LONG, 2][1]:.2f} "
        f"times those of two in one step, four {gain[LONG, 4][0]:.2f} and {gain[LONG, 4][1]:.2f} times. At 128k two give "
        f"{gain[2**17, 2][0]:.2f} times those of one and {gain[2**17, 2][1]:.2f} of one step, four {gain[2**17, 4][0]:.2f} and "
        f"{gain[2**17, 4][1]:.2f}; one step of four with four lanes comes close, {four['wall_ms_a_token']:.2f} ms a session (wall) against "
        f"{aside[2**17, 4][0]:.2f}.",
        "SIDEBEFORE": f"Before, with `both`, two took {side[FATHOM, 2]:.1f} ms with Fathom, {side[SPARQ, 2]:.1f} with SparQ and "
        f"{side[DOUBLE, 2]:.1f} with 136 bits, four {side[FATHOM, 4]:.1f}, {side[SPARQ, 4]:.1f} and {side[DOUBLE, 4]:.1f}.",
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
    speed = {key: float(members["klt"]["ratio"]) for key, members in lines.items() if "klt" in members}
    plain = [(length, label) for length in FIDELITY for label in (DOUBLE_4, SPARQ_4, LOKI_4)]
    more = [key for key in lines if key not in plain]
    found = [key for key in more if key in speed]
    now = {step["label"]: step["gpu_ms"] for step in paced_equal()}
    both, gpu = ({pair[side]["label"]: pair[side]["gpu_ms"] for pair in both_ways()} for side in (0, 1))
    kept = errors_without_the_largest_gain("90k", SMALL.format(26), DOUBLE_4)
    saved = {label: gpu[label] - both[label] for label in gpu}
    small = [-value for label, value in saved.items() if "basis=klt" in label and "rerank" not in label and "=40" not in label]
    rescored = [-value for label, value in saved.items() if "rerank" in label]
    cost: dict[tuple[bool, float], list[float]] = {}
    for step, plain_step in reranked():
        cost.setdefault((step["method"] == "fathom", step["rerank"]), []).append(step["wall_ms"] - plain_step["wall_ms"])
    first, second = dict.fromkeys(step["round"] for step in equal_steps())
    apart = max(abs(step["gpu_ms"] / step["wall_ms"] - 1) for step in paced_equal())
    pairs = turned()
    starts = [[step for step in equal_steps() if step["round"] == start] for start in (first, second)]
    kept_steps = lines_of("records.jsonl.gz", EQUAL)
    again = len(starts[0]) - sum(step["round"] == first for step in kept_steps)
    before = equal_lines(EQUAL)
    raw = [float(before[length, DOUBLE_4]["raw"]["ratio"]) for length in FIDELITY]
    sizes = [(steps[0]["distinct_layers"], steps[0]["host_bytes"] / 2**30) for steps in (*starts, paced_equal())]
    return {
        "EQUALCOUNT": f"{len(kept_steps)} records",
        "EQUALFIRST": f"all {len(starts[0])} records of the first start, {again} of which were timed again",
        "EQUALAPART": f"In the first {sizes[0][0]} of {starts[0][0]['layers']} layers have buffers of their own ({sizes[0][1]:.1f} GiB)",
        "EQUALAPART2": f"In the second {sizes[1][0]} have ({sizes[1][1]:.1f} GiB)",
        "EQUALPACED": f"{len(paced_equal())} records, {sizes[2][0]} of {starts[0][0]['layers']} layers apart ({sizes[2][1]:.1f} GiB)",
        "REACHED": f"The aim of three times is reached against double_sparsity, {speed['90k', DOUBLE_4]:.2f} at the errors of 90k and "
        f"{speed['32k', DOUBLE_4]:.2f} at those of 32k, and against Loki at 32k, {speed['32k', LOKI_4]:.2f}.",
        "MISSED": f"It is missed against SparQ, {speed['90k', SPARQ_4]:.2f} and {speed['32k', SPARQ_4]:.2f}, against Loki at 90k, "
        f"{speed['90k', LOKI_4]:.2f}, and wherever the reference has union or rerank too: of {len(more)} such pairs Fathom reaches "
        f"{len(found)}, at {span(speed[key] for key in found)} (by wall time {span(wall_ratio(lines[key]['klt']) for key in found)}).",
        "CLOSE": f"The mean error of budget 26 is below the reference's in {below('90k', SMALL.format(26), DOUBLE_4)} windows; without the "
        f"one that speaks for it most, the means are {kept[0]:.3f} and {kept[1]:.3f}. Budget 28 is below in "
        f"{below('90k', SMALL.format(28), DOUBLE_4)} and gives {now[DOUBLE_4] / now[SMALL.format(28)]:.2f} times. At 32k budget 24 "
        "is below "
        f"in {below('32k', SMALL.format(24), DOUBLE_4)}.",
        "FEW": f"the mean of budget 24 with twice k is below that of double_sparsity with twice k at 90k, but only "
        f"{below('90k', 'fathom budget=24 basis=klt rerank=2.0 attend=union', 'double_sparsity c=D/4 rerank=2.0')} windows are.",
        "OWN": f"Where its heads attend to their own winners alone and nothing is rescored, it was "
        f"{plain_ratio('90k', DOUBLE_4):.2f} times "
        f"as fast as double_sparsity, {plain_ratio('90k', LOKI_4):.2f} as Loki and {plain_ratio('90k', SPARQ_4):.2f} as SparQ before rows "
        "were paced, at either length.",
        "UNREACHED": f"{len(lines) - len(speed)} of {len(lines)} pairs of errors and reference are left out, since no timed budget reaches "
        "their error:",
        "RAWSPEED": f"In the model's own channels it was {raw[0]:.2f} and {raw[1]:.2f} times as fast as double_sparsity, before rows were "
        "paced.",
        "TURNED": f"In {len(pairs)} pairs of an earlier start GEMMs take {span((gemm for gemm, _ in pairs), 1)} ms more in a basis, "
        "and the "
        f"wall time differs by {span((wall for _, wall in pairs), 1).replace('-', '−')} ms.",
        "NOISE": f"GPU and wall time of these steps differ by up to {100 * apart:.1f} %.",
        "RERANKCOST": f"1.5 times k costs budgets 24 and 32 {span(cost[True, 1.5], 1)} ms of wall time, twice k "
        f"{span(cost[True, 2], 1)}. The "
        f"136-bit scans hide more of it: {span(cost[False, 2], 1)} ms for twice k.",
        "SAVED": f"It saves at most {max(saved.values()):.1f} ms (SparQ of an eighth of the channels), {saved[FATHOM]:.1f} for "
        "Fathom 48 and "
        f"{saved[SMALL.format(40)]:.1f} for budget 40; with 136 bits it makes "
        f"{span((-saved[label] for label in (DOUBLE_4, SPARQ_4, LOKI_4)), 1)} ms more, with smaller budgets {span(small, 1)}, and "
        "with rerank "
        f"{span(rescored, 1)}.",
    }


def all_phrases() -> dict[str, str]:
    return {
        **phrases(),
        **phrases_of_pacing(),
        **phrases_of_many(),
        **phrases_of_equal_errors(),
        **phrases_of_evaluations(),
        **phrases_of_checks(),
    }
