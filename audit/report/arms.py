"""The section on training arms: what training on each kind of credit gave, at equal dose.

Knows: that an arm stands beside its control, and a difference beside the dose it was bought with. Hides: nothing more.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from audit.report.parts import Drawing, Missing, Part, Section, Table, Text, interval
from audit.training.contrasts import Contrasts
from audit.training.response import DoseResponse

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def arms_section(contrasts: Contrasts, marks: tuple[str, ...], prefix: str) -> Section:
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


def _forest(contrasts: Contrasts, figure: Figure) -> None:
    _below(contrasts.plot(figure.subplots()), figure, 2)


def _dose(response: DoseResponse, figure: Figure) -> None:
    _below(response.plot(figure.subplots()), figure, 3)


def _below(ax: Axes, figure: Figure, columns: int) -> None:
    """The legend below the figure, where it covers nothing."""
    legend = ax.get_legend()
    if legend is not None:
        legend.remove()
    figure.legend(loc="outside lower left", ncols=columns, frameon=False)
