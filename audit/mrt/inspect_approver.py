"""Any Inspect task as a micro-randomised trial: review of tool calls at random, and its `.eval` log as the two tables.

Knows: inspect_ai's approvers and logs (extra `[inspect]`; tested with 0.3.285). Hides: where the coin is written (the
metadata of the approval event) and how a sample's decisions are counted.

    from inspect_ai.approval import ApprovalPolicy
    eval(task, approval=[ApprovalPolicy(randomized_review(my_approver, p=0.5, seed=1), "*")], epochs=20)
    audit mrt import logs/....eval --out trial

Treated: the reviewer decides about the tool call. Untreated: the call is approved as it is. The coin follows from seed,
sample, epoch and the number of the tool call, so an evaluation that is retried flips the same coins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from audit.mrt.data import MRTData
from audit.mrt.trial import Trial, keep
from audit.records import draws
from envs.core import InputError

NAME = "credit_audit_mrt"
FEATURES = ("tool", "last_failed", "n_messages", "n_arguments")


def randomized_review(
    reviewer: Any, *, p: float = 0.5, seed: int = 0, otherwise: Literal["approve", "escalate"] = "approve"
) -> Any:
    """An approver for inspect_ai's approval policies that asks `reviewer` with probability p.

    reviewer: an inspect_ai approver (human, a model's, a rule). otherwise: what happens to calls that are not reviewed:
    approved, or left to the next approver of the policy. Assignment, probability and what was known before the coin are
    logged with every approval. Raises InputError for p outside (0, 1), without inspect_ai, or outside of a sample.
    """
    if not 0 < p < 1:
        raise InputError(f"p is {p:g}; expected a probability strictly between 0 and 1.")
    if otherwise not in ("approve", "escalate"):
        raise InputError(f"otherwise is {otherwise!r}; expected approve or escalate.")
    try:
        from inspect_ai.approval import Approval, approver
        from inspect_ai.solver._task_state import sample_state  # no public name gives an approver its sample
    except ImportError as error:
        raise InputError(f"inspect_ai is needed ({error}): pip install 'credit-audit[inspect]'.") from None

    async def approve(message: str, call: Any, view: Any, history: list[Any]) -> Any:
        state = sample_state()
        if state is None:
            raise InputError("randomized_review: there is no sample here; use it as an approval policy of an eval.")
        number = _number(call, history)
        word = draws(1, "inspect", seed, str(state.sample_id), state.epoch, number)[0]
        arm = int((word >> 11) * 2.0**-53 < p)
        coin = {"arm": arm, "p": p, "t": number, **_known(call, history)}
        answer = await reviewer(message, call, view, history) if arm else Approval(decision=otherwise)
        changed = answer.decision not in ("approve", "escalate")
        return answer.model_copy(
            update={"metadata": {**(answer.metadata or {}), NAME: {**coin, "changed": bool(arm and changed)}}}
        )

    def build() -> Any:
        return approve

    return approver(name=NAME)(build)()


def _number(call: Any, history: Sequence[Any]) -> int:
    """How many tool calls the model made before this one in its sample."""
    calls = [made.id for message in history for made in (getattr(message, "tool_calls", None) or ())]
    return calls.index(call.id) if call.id in calls else len(calls)


def _known(call: Any, history: Sequence[Any]) -> dict[str, Any]:
    results = [message for message in history if message.role == "tool"]
    return {
        "tool": call.function,
        "last_failed": int(bool(results) and results[-1].error is not None),
        "n_messages": len(history),
        "n_arguments": len(call.arguments or {}),
    }


def read_eval_log(path: Path, *, scorer: str | None = None) -> MRTData:
    """The trial in an `.eval` log (or a `.json` one).

    Trajectories are samples by epoch, the task is the sample, the outcome is the score as a number (C is 1, I is 0).
    scorer: its name where the log has several. Samples without that score, such as failed ones, are left out: there is
    no outcome to learn from. Raises InputError where the log has no coin, no such scorer, or cannot be read.
    """
    try:
        from inspect_ai.log import read_eval_log as read
        from inspect_ai.scorer import value_to_float
    except ImportError as error:
        raise InputError(f"inspect_ai is needed ({error}): pip install 'credit-audit[inspect]'.") from None
    try:
        log = read(str(path))
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise InputError(f"{path}: cannot be read as an Inspect log ({type(error).__name__}).") from None
    number = value_to_float()
    names = sorted({name for sample in log.samples or () for name in sample.scores or {}})
    if scorer is None and len(names) > 1:
        raise InputError(f"{path}: has several scorers ({', '.join(names)}); name one.")
    if scorer is not None and scorer not in names:
        raise InputError(f"{path}: has no scorer {scorer!r}; it has {', '.join(names) or 'none'}.")
    rows: list[dict[str, Any]] = []
    trajectories: list[dict[str, Any]] = []
    for sample in log.samples or ():
        score = (sample.scores or {}).get(scorer or (names[0] if names else ""))
        if score is None:
            continue
        key = f"{sample.id}/{sample.epoch}"
        trajectories.append({"trajectory": key, "outcome": float(number(score.value)), "task": str(sample.id)})
        coins = [
            {**event.metadata[NAME], "decision": event.decision}
            for event in sample.events
            if event.event == "approval" and event.approver == NAME and event.metadata and NAME in event.metadata
        ]
        rows += [{"trajectory": key, "eligible": 1, **coin} for coin in sorted(coins, key=lambda coin: int(coin["t"]))]
    if not rows:
        raise InputError(f"{path}: no approval in it was randomised; evaluate with randomized_review as an approver.")
    table = pd.DataFrame(trajectories)
    cluster = "task" if table["task"].nunique() > 1 else "trajectory"
    return MRTData(pd.DataFrame(rows), table, features=FEATURES, cluster=cluster)


def import_eval_log(path: Path, out: Path, *, scorer: str | None = None) -> Trial:
    """Read an `.eval` log (see `read_eval_log`) and keep it as a trial in `out`."""
    return keep(read_eval_log(path, scorer=scorer), out, imported=path.name)
