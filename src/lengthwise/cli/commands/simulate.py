"""`lengthwise simulate`: execute plans in virtual time; needs no torch."""

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.compare_options import Overlap, PricePerHour, Tokens
from lengthwise.cli.launch import split_arguments
from lengthwise.cli.shared_options import ComputeDtype, Json, KinetoFolder, TraceRanks, TraceSteps
from lengthwise.config.limits import MAX_STEPS
from lengthwise.session.console import emit_json, stderr

Steps = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_STEPS, help="steps to plan; default: 10, or all that a file of plans holds"),
]
Jitter = Annotated[float, typer.Option(metavar="SIGMA", help="lognormal noise on every micro-batch, such as 0.1")]
Straggler = Annotated[list[str] | None, typer.Option(metavar="RANK:FACTOR", help="a rank that is slower; repeatable")]

ChakraFolder = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="write Chakra traces, the input of ASTRA-sim, here")
]
Model = Annotated[str | None, typer.Option(metavar="NAME|DIR", help="the model, where no run or config names it")]
Device = Annotated[str | None, typer.Option(metavar="NAME|FILE", help="the device, where no run or config names it")]
Dtype = Annotated[ComputeDtype | None, typer.Option(help="what plans outside of a run compute in; default: bfloat16")]


def run(
    source: Annotated[Path | None, typer.Argument(help="plans.jsonl of `plan` or of a run, or a YAML config")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    steps: Steps = None,
    jitter: Jitter = 0.0,
    straggler: Straggler = None,
    overlap: Overlap = None,
    trace: Annotated[Path | None, typer.Option(help="write a Chrome trace (.json.gz) here")] = None,
    trace_steps: TraceSteps = None,
    trace_ranks: TraceRanks = None,
    kineto: KinetoFolder = None,
    chakra: ChakraFolder = None,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    tokens: Tokens = None,
    price_per_hour: PricePerHour = None,
    html: Annotated[Path | None, typer.Option(help="write a page with timelines and memory here")] = None,
    as_json: Json = False,
) -> None:
    """Predict step time, idle share and throughput of a run's first steps, or of plans made before."""
    from lengthwise.cli.tables.simulate_table import print_simulation
    from lengthwise.report.trace_choice import TraceChoice
    from lengthwise.report.whole_file import check_folder, check_place, write_whole
    from lengthwise.session import simulation_inputs as inputs
    from lengthwise.session.simulate_plans import figures, parse_straggler
    from lengthwise.session.simulation_report import simulation_html
    from lengthwise.session.simulation_traces import write_execution_traces, write_traces
    from lengthwise.session.sweep import parse_budget
    from lengthwise.sim.sim_options import SimOptions
    from lengthwise.sim.step_summary import summary

    check_place(trace, "--trace")
    check_place(html, "--html")
    check_folder(kineto, "--kineto")
    check_folder(chakra, "--chakra")
    budget = parse_budget(tokens, price_per_hour)
    choice = TraceChoice.parse(trace_steps, trace_ranks)
    options = SimOptions(jitter=jitter, stragglers=dict(map(parse_straggler, straggler or [])), overlap=overlap)
    path, changes = split_arguments(source, overrides)
    named = inputs.Named(model=model, device=device, dtype=dtype and dtype.value)
    named.check(path)
    plans = inputs.plans_of(path, changes, steps=steps)
    simulated = [summary(plan, options) for plan in plans]
    document = figures(plans, simulated)
    per_gpu = document["tokens_per_s_per_gpu"]
    document |= inputs.training_outlook(plans, per_gpu, path, changes, named=named, budget=budget)
    if (trace or kineto) and (note := write_traces(plans, options, choice, trace=trace, kineto=kineto)):
        stderr().print(note, soft_wrap=True)
    if chakra is not None:
        write_execution_traces(chakra, plans, choice, inputs.model_of_plans(path, changes, named))
    if html is not None:
        memory = inputs.device_bytes_of(path, changes, name=device)
        write_whole({html: simulation_html(plans, simulated, options, document, device_bytes=memory).encode()})
    if as_json:
        emit_json(document)
    else:
        print_simulation(document)
