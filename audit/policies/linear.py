"""The embedded policy: a conditional logit over admissible commands, trained in seconds, read in plain words.

Knows: which features of task, observation, command and remembered history a command has, and how a policy is
saved. Hides: that commands in like situations share a code, so that a decision costs table look-ups.

A command's utility is the sum of the weights of its features (each present or absent); its probability is
exp(utility / temperature), normalised over the admissible commands (McFadden's conditional logit).
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from audit.policies import History
from audit.policies.expert import (
    APPLIANCES,
    CLOSED,
    KNOWN,
    LAMP,
    MEMO_LIMIT,
    SEEN,
    TARGETS,
    VISITS,
    Memory,
    Reader,
    Room,
    rank,
    read_command,
)
from audit.policies.scripted import Choice, ExactPolicy
from envs.core import InputError, Turn

FORMAT = "credit-audit linear policy 1"
MAX_BYTES = 5_000_000
MAX_FEATURES = 100_000

# What a policy can take into account, beside the kind of command in each phase of the task and the names in the
# task (always): how often a place was visited, what is known of its content, whether the thing sought is usually
# found there, the order in which places are listed, which kind of command the last one was, repetition, and
# whether what the task asks was already done to the thing in hand.
GROUPS = ("visits", "contents", "likely", "listed", "habits", "repeats", "progress")

# Phases: nothing in hand and no target known; a target known elsewhere; a target within reach; something else in
# hand; the target in hand and still to be treated; ready to be placed (or, without `progress`, perhaps not);
# lamp not found yet; lamp known.
PHASES = ("search", "fetch", "reach", "clear", "treat", "bring", "seek lamp", "light")
_SEARCH, _FETCH, _REACH, _CLEAR, _TREAT, _BRING, _SEEK, _LIGHT = range(len(PHASES))

KINDS = ("go", "open", "close", "take", "put", "clean", "heat", "cool", "use", "examine", "look", "inventory", "help")
_KIND = {kind: number for number, kind in enumerate((*KINDS, "other"))}
_LAST = {"": 15, **_KIND}

# Layout of a command's code: what follows from its words, then what is remembered.
_KIND_BITS, _IS_TARGET, _IS_LAMP, _AT_DESTINATION, _AT_APPLIANCE, _AS_ASKED, _NAMES_PLACE = (
    0x0F,
    1 << 4,
    1 << 5,
    1 << 6,
    1 << 7,
    1 << 8,
    1 << 9,
)
_RANK_SHIFT, _LAMP_RANK_SHIFT, _STATUS_SHIFT = 10, 13, 16
_FIRST, _HOME, _TREATED, _AGAIN = 1 << 24, 1 << 25, 1 << 26, 1 << 27
_RANKS = ("first", "second", "third", "fourth", "lower", "not")  # on the list of usual places


class Features:
    """Which features the commands of a moment have. groups: the optional ones, a subset of GROUPS."""

    def __init__(self, groups: Sequence[str]) -> None:
        unknown = [group for group in groups if group not in GROUPS]
        if unknown:
            raise InputError(f"Feature group {unknown[0]!r} is not known; expected some of {', '.join(GROUPS)}.")
        self.groups = tuple(group for group in GROUPS if group in groups)
        self._visits, self._contents, self._likely, self._listed, self._habits, self._repeats, self._progress = (
            group in self.groups for group in GROUPS
        )
        self._status_mask = VISITS * self._visits | (KNOWN | TARGETS | LAMP) * self._contents
        self._words: dict[Room, dict[str, tuple[int, int]]] = {}

    def moment(self, memory: Memory, turn: Turn) -> tuple[int, list[int]]:
        """(code of the context, code of each admissible command); equal codes have equal features."""
        room, status = memory.room, memory.status
        treated = memory.treated if self._progress else ()
        words = self._words.get(room)
        if words is None:
            if len(self._words) >= 10_000:
                self._words.clear()
            words = self._words[room] = {}
        home = memory.home() if room.task.kind == "two" and self._contents else -2
        mask, listed = self._status_mask, self._listed
        codes = []
        reach = False
        for text in turn.admissible:
            try:
                code, place = words[text]
            except KeyError:
                code, place = words[text] = _words(room, text)
            if place >= 0:
                known = status[place]
                if listed and not code & _KIND_BITS and not known & VISITS:  # go, to the first not visited
                    code, listed = code | _FIRST, False
                code |= (known & mask) << _STATUS_SHIFT
                if place == home:
                    code |= _HOME
            if code & _IS_TARGET and code & _KIND_BITS == 3:  # take
                if treated and read_command(text).thing in treated:
                    code |= _TREATED
                if not code & _HOME and not (code & _TREATED and code & _AT_DESTINATION):
                    reach = True
            codes.append(code)
        if self._repeats and memory.again is not None and memory.again in turn.admissible:
            codes[turn.admissible.index(memory.again)] |= _AGAIN
        phase = self._phase(memory, reach, home)
        return phase << 4 | (_LAST[memory.last] if self._habits else 15), codes

    def _phase(self, memory: Memory, reach: bool, home: int) -> int:
        task, status = memory.room.task, memory.status
        if memory.holding is None:
            if reach:
                return _REACH
            if self._contents and any(
                known & TARGETS and index != home and index != memory.at for index, known in enumerate(status)
            ):
                return _FETCH
            return _SEARCH
        if memory.holding.rpartition(" ")[0] != task.target:
            return _CLEAR
        if task.kind == "light":
            return _LIGHT if self._contents and any(known & LAMP for known in status) else _SEEK
        treat = self._progress and task.kind in APPLIANCES and memory.holding not in memory.treated
        return _TREAT if treat else _BRING

    def names(self, context: int, code: int) -> list[str]:
        """The names of the features of a command."""
        phase, last = PHASES[context >> 4], context & 15
        kind = (*KINDS, "other")[code & _KIND_BITS]
        known = code >> _STATUS_SHIFT & 0xFF
        seeking = phase in ("search", "seek lamp")
        what = kind
        if kind in APPLIANCES:
            what = "treat as asked" if code & _AS_ASKED else "treat otherwise"
        elif kind in ("take", "put", "examine", "use"):
            thing = "place" if code & _NAMES_PLACE else "lamp" if code & _IS_LAMP else "thing"
            what = f"{kind} {'target' if code & _IS_TARGET else thing}"
        names = [what]
        if code & _AT_DESTINATION and not code & _IS_LAMP:
            names.append(f"{what}: destination")
        if code & _AT_APPLIANCE:
            names.append(f"{what}: appliance")
        if code & _HOME:
            names.append(f"{what}: where the first was put")
        if code & _TREATED:
            names.append(f"{what}: already treated")
        if kind == "go":
            if self._visits and known & VISITS:
                names.append(f"go: visited {('', 'once', 'twice', 'more often')[known & VISITS]}")
            if self._contents:
                if known & KNOWN:
                    names.append("go: left closed" if known & KNOWN == CLOSED else "go: content seen")
                if known & TARGETS:
                    names.append("go: target seen there")
                if known & LAMP:
                    names.append("go: lamp seen there")
            if self._likely and seeking:
                shift = _RANK_SHIFT if phase == "search" else _LAMP_RANK_SHIFT
                names.append(f"go: {_RANKS[code >> shift & 7]} among the usual places")
            if code & _FIRST:
                names.append("go: first not visited in the list")
        elif kind in ("open", "close", "examine") and code & (_NAMES_PLACE) and self._contents and not known & SEEN:
            names.append(f"{kind}: content not seen")
        names = [f"{name} | {phase}" for name in names]
        if self._habits and last != 15:
            names.append(f"{kind} after {(*KINDS, 'other')[last]}")
        if code & _AGAIN:
            names.append("again, though nothing changed")
        return names


def _words(room: Room, text: str) -> tuple[int, int]:
    """What follows from a command's words and the task: its code, and the index of the place it names (else -1)."""
    command, task = read_command(text), room.task
    place = command.place if command.place else command.thing if command.kind == "examine" else ""
    index = room.index.get(place, -1)
    code = _KIND[command.kind]
    if index >= 0:
        place_type = room.types[index]
        code |= _AT_DESTINATION * (place_type == task.destination) | _AT_APPLIANCE * (place_type == task.appliance)
        if command.kind in ("open", "close", "examine"):
            code |= _NAMES_PLACE
        if command.kind == "go":
            last = len(_RANKS) - 1
            for sought, shift in ((task.target, _RANK_SHIFT), (task.destination, _LAMP_RANK_SHIFT)):
                found = rank(sought, place_type)
                code |= (last if found is None else min(found, last - 1)) << shift
    code |= _IS_TARGET * (command.thing_type == task.target and command.thing_type != "")
    code |= _IS_LAMP * (task.kind == "light" and command.thing_type == task.destination)
    code |= _AS_ASKED * (command.kind == task.kind)
    return code, index


class LinearPolicy(ExactPolicy):
    """A conditional-logit policy.

    name: what it is called. groups: which optional features it uses (see GROUPS). weights: utility of each
    feature by name (a feature that is not named has 0). temperature: utilities are divided by it (> 0).
    training: provenance, JSON-ready, without local paths.
    Raises InputError for values out of range.
    """

    def __init__(
        self,
        name: str,
        groups: Sequence[str],
        weights: Mapping[str, float],
        *,
        temperature: float = 1.0,
        training: Mapping[str, Any] | None = None,
    ) -> None:
        if not (math.isfinite(temperature) and temperature > 0):
            raise InputError(f"The temperature of policy {name} is {temperature}; expected a number above 0.")
        if not all(math.isfinite(weight) for weight in weights.values()):
            raise InputError(f"Policy {name} has a weight that is not finite; train it again.")
        self.name, self.temperature, self.training = name, float(temperature), dict(training or {})
        self._features = Features(groups)
        self._weights = {feature: float(weight) for feature, weight in weights.items()}
        self._reader = Reader()
        self._tables: dict[int, dict[int, float]] = {}
        self._choices: dict[tuple[Memory, Hashable], Choice] = {}

    @property
    def groups(self) -> tuple[str, ...]:
        """The optional feature groups it uses."""
        return self._features.groups

    def weights(self) -> pd.DataFrame:
        """One row a feature: index `feature`, column `weight` (utility, before the temperature)."""
        frame = pd.DataFrame({"weight": self._weights}, dtype=float)
        return frame.rename_axis("feature").sort_values("weight", ascending=False, kind="stable")

    def at(self, temperature: float) -> LinearPolicy:
        """The same policy at another temperature."""
        return LinearPolicy(self.name, self.groups, self._weights, temperature=temperature, training=self.training)

    def describe(self) -> dict[str, Any]:
        """What the policy is; `weights` is the SHA-256 of the weights, so that the identity follows from them."""
        return {
            "kind": "linear",
            "name": self.name,
            "groups": list(self.groups),
            "temperature": self.temperature,
            "weights": _digest(list(self._weights), self._array()),
            "training": self.training,
        }

    def choice(self, history: History) -> Choice | None:
        """The distribution over admissible commands."""
        turn = history.turn
        memory = self._reader.memory(history)
        key = memory, turn.state
        choice = self._choices.get(key)
        if choice is None:
            if not turn.admissible:
                return None
            if len(self._choices) >= MEMO_LIMIT:
                self._choices.clear()
            choice = self._choices[key] = self._choice(memory, turn)
        return choice

    def _choice(self, memory: Memory, turn: Turn) -> Choice:
        context, codes = self._features.moment(memory, turn)
        table = self._tables.get(context)
        if table is None:
            table = self._tables[context] = {}
        try:
            scores = [table[code] for code in codes]
        except KeyError:
            for code in codes:
                if code not in table:
                    names = self._features.names(context, code)
                    table[code] = sum(self._weights.get(name, 0.0) for name in names) / self.temperature
            scores = [table[code] for code in codes]
        top = max(scores)
        exponentials = [math.exp(score - top) for score in scores]
        total = sum(exponentials)
        log_total = math.log(total) + top
        return Choice(turn.admissible, [e / total for e in exponentials], [score - log_total for score in scores])

    # Files

    def _array(self) -> npt.NDArray[np.float64]:
        return np.array(list(self._weights.values()), dtype="<f8")

    def save(self, path: str | Path) -> None:
        """Write `path` (JSON, read by people) and the weights beside it (.npz). Raises InputError if it cannot."""
        path = Path(path)
        if path.suffix != ".json":
            raise InputError(f"{path}: a policy is saved as a .json file (its weights go beside it, as .npz).")
        about = {
            "format": FORMAT,
            "name": self.name,
            "groups": list(self.groups),
            "temperature": self.temperature,
            "training": self.training,
            "weights": _digest(list(self._weights), self._array()),
            "features": list(self._weights),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path.with_suffix(".npz"), weights=self._array())
            path.write_text(json.dumps(about, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"{path}: cannot be written ({error.strerror}); name a file in a folder that can."
            ) from None

    @classmethod
    def load(cls, path: str | Path) -> LinearPolicy:
        """Open a saved policy. Files are data: nothing in them is run, and nothing in them names another file.

        Raises InputError where a file is missing, too large, of another shape, or the two do not belong together.
        """
        path = Path(path)
        about = _read_about(path)
        features: list[str] = about["features"]
        weights = _read_weights(path.with_suffix(".npz"), len(features))
        if _digest(features, weights) != about.get("weights"):
            raise InputError(
                f"{path}: the weights in {path.stem}.npz are not those it was saved with; save both again."
            )
        try:
            return cls(
                about["name"],
                about["groups"],
                dict(zip(features, weights.tolist(), strict=True)),
                temperature=about["temperature"],
                training=about["training"],
            )
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def _digest(features: Sequence[str], weights: npt.NDArray[np.float64]) -> str:
    return hashlib.sha256(json.dumps(list(features)).encode() + weights.astype("<f8").tobytes()).hexdigest()


def _read_about(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path}: {path.stat().st_size} bytes; a saved policy has at most {MAX_BYTES}.")
        about = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); audit train makes such a file.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a JSON file ({str(error)[:120]}); audit train makes such a file.") from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise InputError(f"{path}: no saved policy of this version; expected format {FORMAT!r}, as audit train writes.")

    def texts(value: object) -> bool:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)

    shapes = {
        "name": isinstance(about.get("name"), str),
        "groups": texts(about.get("groups")),
        "temperature": isinstance(about.get("temperature"), (int, float)) and 0 < about["temperature"] < 1e6,
        "training": isinstance(about.get("training"), dict),
        "features": texts(about.get("features"))
        and len(set(about["features"])) == len(about["features"]) <= MAX_FEATURES,
    }
    for key, good in shapes.items():
        if not good:
            raise InputError(f"{path}: {key!r} is missing or of another shape; save the policy again.")
    return about


def _read_weights(path: Path, n: int) -> npt.NDArray[np.float64]:
    try:
        with zipfile.ZipFile(path) as archive:  # sizes first: a small archive can unpack to a large array
            sizes = {item.filename: item.file_size for item in archive.infolist()}
        if set(sizes) != {"weights.npy"} or sum(sizes.values()) > MAX_BYTES:
            raise InputError(f"{path}: expected one array `weights` of {n} numbers; save the policy again.")
        with np.load(path, allow_pickle=False) as arrays:
            weights = arrays["weights"]
    except FileNotFoundError:
        raise InputError(f"{path}: the weights are missing; they belong beside the .json file.") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: the weights cannot be read ({str(error)[:120]}); save the policy again.") from None
    if weights.dtype != np.float64 or weights.shape != (n,) or not np.isfinite(weights).all():
        raise InputError(f"{path}: expected {n} finite 64-bit weights, one a feature; save the policy again.")
    return np.asarray(weights, dtype=np.float64)
