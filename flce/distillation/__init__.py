"""Distillation: losses between a student's head and a teacher's."""

from .divergence import linear_divergence

__all__ = ["linear_divergence"]
