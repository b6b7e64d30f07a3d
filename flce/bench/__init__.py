"""Thirty seconds on this machine: the loss in eager torch, under torch.compile, and by flce.

`python -m flce.bench` prints a table and writes a picture and a JSON to send. Time and peak memory
of a forward and backward of the head and its loss alone; benchmarks/ has the complete measurements.
"""

from .cases import CONTESTANTS, Case, default_case
from .machine import machine
from .run import Result, run

__all__ = ["CONTESTANTS", "Case", "Result", "default_case", "machine", "run"]
