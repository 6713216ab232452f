"""A simulator of a continuous-batching engine that drives the manager through its public face.

Data flows one way: requests (readers, synthetic) -> clients -> planner -> device -> meter and tally -> report. The
loop that joins them stands in simulator.py, what a step costs in traffic.py, calibration.py and cost.py.
"""
