"""What several tests use: CONTRIBUTING.md has a line for each file."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
