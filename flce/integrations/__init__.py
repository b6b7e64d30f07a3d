"""Trainers and packages that run flce in place of their own fused loss, one module for each.

`trl`, `liger`, `cce` and `verl` have an `install()`, which rebinds the package's loss until its
handle is removed; the others have classes to name in the framework's configuration.
docs/integrations.md says what each serves. Nothing here is imported with flce, and a module
imports its package when it is used.
"""
