"""Language models without a model: they answer what a function of the question says, and count what they are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from audit.llm.answers import Sample
from audit.llm.client import Prompt, Sampling
from audit.policies.openai import DecodeSettings, LLMPolicy, PromptSettings

Ids = tuple[int, ...]


class FakeBackend:
    """says: the answer to a question (text, draw). likes: the log probability of a word after a question."""

    def __init__(
        self,
        says: Callable[[str, int], str | Sample] = lambda text, draw: "",
        likes: Callable[[str, str], float] = lambda text, word: -1.0,
    ) -> None:
        self.says, self.likes = says, likes
        self.asked: list[str] = []
        self.scored: list[str] = []

    async def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [tuple(map(ord, text)) for text in texts]

    async def encode_chat(self, chats: Sequence[Prompt]) -> list[Ids]:
        return await self.encode(["\n".join(part[1] for part in chat) for chat in chats])

    async def sample(
        self, prompts: Sequence[Prompt], draws: Sequence[int], settings: Sampling, **options: Any
    ) -> list[Sample]:
        found = []
        for prompt, draw in zip(prompts, draws, strict=True):
            parts = [prompt] if isinstance(prompt, str) else [chr(p) if isinstance(p, int) else p[1] for p in prompt]
            text = "\n".join(parts)
            self.asked.append(text)
            answer = self.says(text, draw)
            found.append(answer if isinstance(answer, Sample) else Sample(answer))
        return found

    async def score(
        self, prompts: Sequence[Ids], actions: Sequence[Sequence[Ids]], *, purpose: str, repeat: str = ""
    ) -> list[list[tuple[float, ...]]]:
        """What it likes is on the first token of an answer to a question; every other token has its own score."""
        found = []
        for prompt, some in zip(prompts, actions, strict=True):
            text = "".join(map(chr, prompt))
            self.scored.append(text)
            found.append([self.tokens(text, "".join(map(chr, ids))) for ids in some])
        return found

    def tokens(self, text: str, word: str) -> tuple[float, ...]:
        own = [-0.001 * ord(letter) for letter in word]
        if "and nothing else: " in text:
            own[0] = float(self.likes(text, word))
        return tuple(own)

    def describe(self) -> dict[str, Any]:
        return {"fake": True}


def model(backend: FakeBackend, mode: str = "sample", style: str = "chat", **decode: Any) -> LLMPolicy:
    """A saved language model over a fake backend."""
    return LLMPolicy("fake", backend, PromptSettings(style=style), DecodeSettings(mode=mode, **decode))  # type: ignore[arg-type]
