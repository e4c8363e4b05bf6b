"""Speed, memory and cost, each beside a peer and beside what this machine can do at most, in one run.

What belongs here: anything timed. What does not: tests of results (tests/). Figures are compared as ratios within one
run, since machines differ and are shared; `python -m benchmarks --help` lists the questions.

    questions/  one answer each: what is measured, and the tables that it makes
    systems/    jaxlm and its peers behind the same few operations
    worker.py   one system in a process of its own; turns.py is the parent's side
    costs.py    what the arithmetic says; machine.py what the machine can do
    report.py, plot.py, baseline.py   the table, the picture, the comparison with stored ratios
"""
