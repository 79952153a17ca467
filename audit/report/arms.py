"""The section on training arms: what training on each kind of credit gave, at equal dose.

Knows: that an arm stands beside its control, and a difference beside the dose it was bought with. Hides: nothing more.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.figure import Figure

from audit.report.parts import Drawing, Missing, Part, Section, Table, Text, interval, short
from audit.training.contrasts import Contrasts
from audit.training.levels import ArmLevels
from audit.training.response import DoseResponse

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def arms_section(contrasts: Contrasts, levels: ArmLevels, marks: tuple[str, ...], prefix: str) -> Section:
    """Everything of one study of arms."""
    frame = contrasts.to_frame()
    pairs = len(frame[["arm", "against"]].drop_duplicates())
    parts: list[Part] = [*(Text(mark, "mark") for mark in marks)]
    parts += [Text(line) for line in contrasts.headline().split("\n")]
    parts.append(
        Drawing(
            f"{prefix}arms",
            "Arms of credit against their controls",
            f"Right of zero the arm did better on held-out tasks. The grey band is too small to matter "
            f"(±{contrasts.sesoi:g}). Filled: equal dose, which is what the study is about; open: as doses come.",
            frame,
            partial(_forest, contrasts),
            (6.0, 1.3 + 0.33 * pairs),
            alt="Forest of differences between arms",
        )
    )
    table = contrasts.summary().assign(
        interval=[interval(a, b) for a, b in zip(frame["low"], frame["high"], strict=True)]
    )
    names = {"arm": "arm", "against": "against", "dose": "dose", "family": "family", "success": "success"}
    names |= {"estimate": "difference", "interval": "interval", "p_holm": "Holm p", "mde": "detectable"}
    parts.append(Table.of("Differences between arms", table, {**names, "verdict": "verdict"}, verdict="verdict"))
    parts += _levels(levels, prefix)
    if contrasts.dose is None:
        parts.append(Missing("No arm has a dose on record, so there is no dose scatter."))
        return Section("Training arms", parts, "Arms")
    parts.append(
        Drawing(
            f"{prefix}dose",
            "Success against dose",
            "If success only followed how much was trained, all points would lie on one line.",
            contrasts.dose.to_frame(),
            partial(_dose, contrasts.dose),
            (6.0, 4.4),
            alt="Scatter of success against dose",
        )
    )
    parts.append(Table.of(f"Success against log10 of {contrasts.dose.by}", contrasts.dose.summary()))
    return Section("Training arms", parts, "Arms")


def _levels(levels: ArmLevels, prefix: str) -> list[Part]:
    frame = levels.to_frame()
    drawing = Drawing(
        f"{prefix}levels",
        "Each arm on its own",
        "Success on held-out tasks. Arms may differ from each other and yet all lie left of the line, the untrained "
        "policy: then no training helped.",
        frame,
        partial(_success, levels),
        (6.0, 1.3 + 0.3 * frame["arm"].nunique()),
        alt="Forest of the arms' success beside the untrained policy",
    )
    shown = levels.summary().assign(
        interval=[interval(a, b) for a, b in zip(frame["low"], frame["high"], strict=True)],
        around=[interval(a, b) for a, b in zip(frame["gain_low"], frame["gain_high"], strict=True)],
    )
    names = {"arm": "arm", "dose": "dose", "success": "success", "interval": "interval"}
    names |= {"over_control": "over its control", "gain": "over untrained", "around": "interval of that"}
    names |= {"effective": "effective sample size", "steps": "steps"}
    return [drawing, Table.of("Each arm on its own", shown, names)]


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with names that fit a figure; a control keeps what says so."""
    return frame.assign(**{c: frame[c].map(lambda name: short(name, 30)) for c in ("arm", "against") if c in frame})


def _forest(contrasts: Contrasts, figure: Figure) -> None:
    _below(replace(contrasts, frame=_named(contrasts.frame)).plot(figure.subplots()), figure, 2)


def _success(levels: ArmLevels, figure: Figure) -> None:
    _below(replace(levels, frame=_named(levels.frame)).plot(figure.subplots()), figure, 2)


def _dose(response: DoseResponse, figure: Figure) -> None:
    _below(replace(response, frame=_named(response.frame)).plot(figure.subplots()), figure, 3)


def _below(ax: Axes, figure: Figure, columns: int) -> None:
    """The legend below the figure, where it covers nothing."""
    legend = ax.get_legend()
    if legend is not None:
        legend.remove()
    figure.legend(loc="outside lower left", ncols=columns, frameon=False)
