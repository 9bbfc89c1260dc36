"""What the prefix trie must do, on a plain list."""

from __future__ import annotations

from core.offline_queue.offline_requests import num_shared_tokens

Prompt = tuple[int, ...]


class NaiveTrie:
    """The waiting requests in the trie's order, found by comparing every pair of prompts."""

    def __init__(self) -> None:
        self.prompts: dict[int, Prompt] = {}
        """Of every request that waits or runs, by number."""
        self.waiting: list[int] = []

    def insert(self, number: int, prompt: Prompt) -> None:
        self.prompts[number] = prompt
        self._place(number, is_new=True)

    def suspend(self, number: int) -> None:
        self.waiting.remove(number)

    def resume(self, number: int) -> None:
        self._place(number, is_new=False)

    def remove(self, number: int) -> None:
        if number in self.waiting:
            self.waiting.remove(number)
        del self.prompts[number]

    def promote(self, number: int, num_cached: int) -> None:
        """At each fork before that many tokens, bring the request's branch to the front."""
        shared = {
            other: num_shared_tokens(self.prompts[number], self.prompts[other])
            for other in self.waiting
        }
        for fork in sorted({shared[other] for other in self.waiting if other != number}):
            if fork >= num_cached:
                continue
            below = [i for i, other in enumerate(self.waiting) if shared[other] >= fork]
            branch = [
                self.waiting[i]
                for i in below
                if self.waiting[i] == number or shared[self.waiting[i]] > fork
            ]
            rest = [self.waiting[i] for i in below if self.waiting[i] not in branch]
            self.waiting[below[0] : below[-1] + 1] = branch + rest

    def near(self, prompt: Prompt) -> list[int]:
        return sorted(
            self.waiting, key=lambda number: -num_shared_tokens(prompt, self.prompts[number])
        )

    def _place(self, number: int, *, is_new: bool) -> None:
        """Join the waiting requests that share the longest prefix.

        Behind them if the request is a new branch of the very prefix they share,
        before them if the branch in which it is had come to rest.
        """
        shared = {
            other: num_shared_tokens(self.prompts[number], prompt)
            for other, prompt in self.prompts.items()
            if other != number
        }
        leaves_all_at = max(shared.values(), default=0)
        closest = max((shared[other] for other in self.waiting), default=0)
        group = [i for i, other in enumerate(self.waiting) if shared[other] == closest]
        if not group:
            position = 0
        elif is_new and closest == leaves_all_at:
            position = group[-1] + 1
        else:
            position = group[0]
        self.waiting.insert(position, number)
