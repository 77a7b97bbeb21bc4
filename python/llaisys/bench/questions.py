"""Score of a chat model on thirty plain questions: shows whether its answers are right and end."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llaisys.common.progress import report
from llaisys.common.repetition import CHAT_DETECTION, DETECTED
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import RequestOutput
from llaisys.entrypoints.llm import LLM

NEW_TOKENS = 128
GREEDY = {"temperature": 0, "repetition_penalty": 1}

# (question, pattern of a right answer)
QUESTIONS: tuple[tuple[str, str], ...] = (
    ("What is the capital of France?", r"Paris"),
    ("What is the capital of Germany?", r"Berlin"),
    ("What is the capital of Italy?", r"Rome"),
    ("What is the capital of Japan?", r"Tokyo"),
    ("What is 2 + 3?", r"5|five"),
    ("What is 10 minus 4?", r"6|six"),
    ("What is 7 times 8?", r"56"),
    ("What is the opposite of hot?", r"cold"),
    ("What is the opposite of big?", r"small|little|tiny"),
    ("What color is the sky on a clear day?", r"blue"),
    ("What color do you get when you mix blue and yellow?", r"green"),
    ("How many days are in a week?", r"7|seven"),
    ("How many legs does a spider have?", r"8|eight"),
    ("How many minutes are in an hour?", r"60|sixty"),
    ("What is the largest planet in the solar system?", r"Jupiter"),
    ("Which planet is known as the red planet?", r"Mars"),
    ("Who wrote Romeo and Juliet?", r"Shakespeare"),
    ("Who painted the Mona Lisa?", r"Leonardo|Da Vinci"),
    ("Who was the first president of the United States?", r"Washington"),
    ("What is the chemical formula of water?", r"H2O|H₂O"),
    ("What gas do plants absorb from the air?", r"carbon dioxide|CO2|CO₂"),
    ("What is the chemical symbol for gold?", r"Au"),
    ("What is the largest ocean on Earth?", r"Pacific"),
    ("What is the tallest mountain in the world?", r"Everest"),
    ("What is the longest river in Africa?", r"Nile"),
    ("What language is spoken in Brazil?", r"Portuguese"),
    ("What is the plural of mouse?", r"mice"),
    ("Which day comes after Monday?", r"Tuesday"),
    ("What do bees make?", r"honey"),
    ("How many sides does a triangle have?", r"3|three"),
)


@dataclass(frozen=True, slots=True)
class Score:
    """Result of one set of sampling parameters."""

    name: str
    are_right: tuple[bool, ...]  # per question
    loops: int  # answers that were ended because they repeat themselves
    cut_off: int  # other answers that were ended by the token limit
    answers: tuple[str, ...]
    ends: tuple[tuple[str | None, object], ...]  # finish reason and stop reason of each answer

    @property
    def right(self) -> int:
        return sum(self.are_right)


def is_right(pattern: str, answer: str) -> bool:
    return re.search(rf"\b(?:{pattern})\b", answer, re.IGNORECASE) is not None


def run_questions(
    llm: LLM, samplings: Sequence[tuple[str, dict[str, Any]]], max_tokens: int = NEW_TOKENS
) -> list[Score]:
    """Ask all questions with each (name, parameters) of `samplings`, in one batch."""
    prompts = [
        llm.encode_chat([{"role": "user", "content": question}]) for question, _ in QUESTIONS
    ]
    params = [
        SamplingParams(**{
            "max_tokens": max_tokens,
            "repetition_detection": CHAT_DETECTION,
            "seed": 100 * index + number,
            **given,
        })
        for index, (_, given) in enumerate(samplings)
        for number in range(len(QUESTIONS))
    ]  # fmt: skip
    names = [
        llm.submit(prompt, own)
        for prompt, own in zip(prompts * len(samplings), params, strict=True)
    ]
    outputs: list[RequestOutput] = []
    for done, name in enumerate(names):
        report("asking questions", done, len(names))
        while (output := llm.collect(name)) is None:
            llm.step()
        outputs.append(output)
    scores = []
    for index, (name, _) in enumerate(samplings):
        found = outputs[index * len(QUESTIONS) : (index + 1) * len(QUESTIONS)]
        ends = [(output.finish_reason, output.outputs[0].stop_reason) for output in found]
        loops = sum(stop == DETECTED for _, stop in ends)
        scores.append(
            Score(
                name=name,
                are_right=tuple(
                    is_right(pattern, output.text)
                    for (_, pattern), output in zip(QUESTIONS, found, strict=True)
                ),
                loops=loops,
                cut_off=sum(end == "length" for end, _ in ends) - loops,
                answers=tuple(output.text for output in found),
                ends=tuple(ends),
            )
        )
    return scores
