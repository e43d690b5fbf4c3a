"""How fast ringctl is beside what people would use instead: `python -m benchmarks`.

A benchmark is a function in a file of its own and one entry in catalogue.py:

    def startup(bench: Workbench) -> Iterator[Measurement]: ...

It runs ringctl and its competitors in turns (`Workbench.alternate`), so that whatever else the machine
does meets both, and yields one Measurement for each comparison.
"""
