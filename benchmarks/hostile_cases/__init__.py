"""The inputs of ``hostile.py``: tables of cases, a file for each area, and the functions that write the files."""

from __future__ import annotations

from hostile_cases.case import Case
from hostile_cases.chat import conversations, documents, templates
from hostile_cases.disks import disks
from hostile_cases.images import images
from hostile_cases.models import models
from hostile_cases.plans import plans
from hostile_cases.recipes import recipes
from hostile_cases.runs import predict, runs
from hostile_cases.settings import command_line, environment, yaml
from hostile_cases.sweeps import hub_folders, mixtures, sweeps
from hostile_cases.tables import tables
from hostile_cases.trained import asked, exports, listed


def cases() -> list[Case]:
    """Return all cases, in a fixed order."""
    made = (command_line, yaml, recipes, tables, images, models, runs, predict, environment)
    made += (templates, conversations, documents, listed, exports, asked, plans, sweeps, mixtures)
    made += (hub_folders, disks)
    return [case for make in made for case in make()]
