"""Speed, memory and cost, each beside a peer and beside what this machine can do at most, in one run.

What belongs here: anything timed. What does not: tests of results (tests/). Figures are compared as ratios within one
run, since machines differ and are shared; `python -m benchmarks --help` lists the questions.
"""
