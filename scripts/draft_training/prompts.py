"""Training conversations, combined from tasks and topics without downloads."""

from __future__ import annotations

import random

Message = dict[str, str]

THINGS = """the sea|bread|trains|old maps|rivers|the moon|recycling|bicycles|rain|bees|volcanoes
tea|coffee|the human heart|solar panels|the printing press|chess|libraries|mountains|dogs|cats
honey|electric cars|the Roman Empire|black holes|vaccines|the stock market|democracy|photosynthesis
jazz|classical music|paintings|bridges|the internet|smartphones|robots|artificial intelligence
machine learning|gravity|the water cycle|dinosaurs|whales|forests|deserts|earthquakes|inflation
taxes|insurance|the French Revolution|Ancient Egypt|the Silk Road|penguins|elephants|chocolate
cheese|pasta|rice|batteries|magnets|light|sound|memory|sleep|dreams|happiness|friendship|trust
gardens|museums|airports|trade|money|banks|satellites|telescopes|microscopes|steam engines|ships
glass|paper|cotton|steel|concrete|plastic|gold|salt|sugar|spices|the brain|bacteria|viruses|DNA
evolution|climate change|renewable energy|nuclear power|wind|snow|the seasons|calendars|clocks
languages|alphabets|poetry|novels|theatre|cinema|photography|architecture|fashion|football|tennis
swimming|the Olympic Games|board games|video games|open source software|databases|encryption
prime numbers|fractions|probability|triangles|the Pythagorean theorem|statistics|infinity"""
ACTIVITIES = """learning a language|learning to cook|saving money|moving to a new city
running a race|writing a book|starting a small business|planting a garden|planning a birthday party
buying a house|choosing a laptop|preparing for a job interview|giving a speech|sleeping better
making new friends|raising a puppy|travelling with children|learning the guitar|painting a room
repairing a bicycle|baking bread|reading more books|losing weight|building a website
studying for an exam|camping|organising a desk|working from home|leading a team|handling stress
meditating|drawing portraits|learning to swim|hiking in the mountains|volunteering|teaching a class
writing a CV|buying a car|planning a wedding|hosting dinner guests|taking better photographs
keeping a diary|growing tomatoes|managing time|staying healthy in winter|cleaning a kitchen
packing for a long trip|learning to code|cooking for one person|riding a horse|learning to dance
resolving a conflict at work|adopting a cat"""
PLACES = """Paris|Tokyo|New York|Rome|Cairo|Sydney|Brazil|India|China|Kenya|Norway|Iceland|Mexico
Peru|Canada|Spain|Turkey|Greece|Thailand|Germany|London|Istanbul|Vienna|Amsterdam|Berlin|Lisbon
Morocco|South Africa|Argentina|Japan|Italy|Scotland|Ireland|Switzerland|Egypt|Vietnam|Australia
New Zealand"""
CODE = """reverses a string|adds two numbers|finds the largest number in a list
counts the words of a text|checks whether a number is prime|sorts a list of names
reads a file line by line|computes a factorial|merges two dictionaries
removes duplicates from a list|converts Celsius to Fahrenheit|draws a triangle
finds the longest word|checks whether a word is a palindrome|prints the Fibonacci numbers
sums a list|counts the vowels of a string|computes the average of a list|splits a list into chunks
parses a date|finds common elements of two lists|computes the area of a circle|generates a password
flattens a list|groups words by their first letter|counts how often each letter occurs
searches a sorted list"""
FIGURES = """a lighthouse keeper|a young inventor|a lost dog|two sisters|an old fisherman
a talking tree|a brave mouse|a tired teacher|a girl who collects stones
a robot that learns to laugh|a quiet king|a travelling musician|a boy and his kite
a ghost in a library|the last dragon|a baker in a small town|a scientist on Mars|a shy giant
a detective and a missing painting|a sailor far from home|a clever fox|a clockmaker|an astronaut
a gardener who talks to flowers|a postman in the mountains|a painter"""

ABOUT_THINGS = """Explain {} to a child.|What is {}?|What are {} and why do they matter?
List five facts about {}.|Why is {} important?|Write a short essay about {}.
Give me a brief overview of {}.|What is the history of {}?
Summarise what matters about {} in three sentences.|How does {} work?
What are the pros and cons of {}?|Write a poem about {}.|Write an e-mail to a friend about {}.
Tell me something surprising about {}.|What would the world be like without {}?
Write a quiz with four questions about {}.|Describe {} in one paragraph.
What are common misconceptions about {}?|How has {} changed over time?|Write a blog post about {}.
Explain the science behind {}.|Give three reasons to care about {}.
Write a dialogue between two people about {}.|What should a beginner know about {}?
Write a product description that has to do with {}.|Write a haiku about {}.
How do people use {} in everyday life?|Compare {} with {other}.
What do {} and {other} have in common?|Which is more useful, {} or {other}, and why?
Write a short speech about {}.|I am curious about {}. Can you help?
Make a table of contents for a book about {}.
Suggest a title for an article about {}, and write its introduction."""
ABOUT_ACTIVITIES = """How do I start with {}?|Give me tips for {}.
Make a plan for {} in four weeks.|What do I need for {}?|What are the most common mistakes when {}?
Write a checklist for {}.|Is {} worth it?|What should I think of when {}?
Write step-by-step instructions for {}.|How much time does {} take?
I am nervous about {}. What can I do?|What are the benefits of {}?
Write a motivational message about {}.|Give me a budget for {}.|How can I get better at {}?
Write a letter to a friend who is interested in {}.|What are the first three steps of {}?
Which tools help with {}?|My friend says that {} is a waste of time. What can I answer?
What is the hardest part of {}, and how do I deal with it?"""
ABOUT_PLACES = """What should I see in {}?|Plan a three-day trip to {}.
Tell me about the food of {}.|What is the weather like in {}?|Write a postcard from {}.
What is {} famous for?|Describe the culture of {}.|What is the best time to visit {}?
Write a short history of {}.|How do people greet each other in {}?|Compare {} and {other}.
Is {} good for families?|What should I pack for a trip to {}?
Give me five interesting facts about {}.|What languages are spoken in {}?"""
ABOUT_CODE = """Write a Python function that {}.|How do I write a program that {}?
Write JavaScript code that {}.|Explain step by step how to write a function that {}.
Write a function that {} and a test for it.|Show me a short Python script that {}, with comments.
What is the fastest way to write code that {}?"""
ABOUT_FIGURES = """Write a short story about {}.|Write the first paragraph of a novel about {}.
Write a bedtime story about {}.|Write a poem about {}.|Write a scene in which {} meets {other}.
Describe {} in detail.|Write a song about {}.|Invent a name for {} and tell their story.
Write a letter from {} to {other}.|Write a funny story about {}.
What would a day in the life of {} look like?|Write a story about {} that ends well.
Write a diary entry of {}."""

SYSTEMS = """You are a helpful assistant.|You are a concise assistant. Answer in a few sentences.
You are a friendly teacher.|Answer briefly and clearly.
You are an expert who explains things simply.|You are a creative writer.
You are a careful programmer.|Answer in a warm and polite tone."""
OPENINGS = ("Hello!", "Hi,", "Please help me.", "Quick question:", "Task 1.", "I have a question.")
CLOSINGS = ("Thank you!", "Keep it short.", "Be detailed.", "Use simple words.", "Use a list.")

SUBJECTS = (
    (THINGS, ABOUT_THINGS, 8),
    (ACTIVITIES, ABOUT_ACTIVITIES, 5),
    (PLACES, ABOUT_PLACES, 3),
    (CODE, ABOUT_CODE, 2),
    (FIGURES, ABOUT_FIGURES, 3),
)


def make_conversations(count: int, seed: int) -> list[list[Message]]:
    """`count` distinct conversations, reproducible by seed; some have a system prompt, a greeting
    or a format instruction."""
    rng = random.Random(seed)
    subjects = [(_split(names), _split(tasks)) for names, tasks, _ in SUBJECTS]
    weights = [weight for _, _, weight in SUBJECTS]
    systems = _split(SYSTEMS)
    seen: set[str] = set()
    conversations: list[list[Message]] = []
    while len(conversations) < count:
        names, tasks = rng.choices(subjects, weights)[0]
        name, other = rng.sample(names, 2)
        text = rng.choice(tasks).format(name, other=other)
        if rng.random() < 0.15:
            text = f"{rng.choice(OPENINGS)} {text}"
        if rng.random() < 0.15:
            text = f"{text} {rng.choice(CLOSINGS)}"
        if text in seen:
            continue
        seen.add(text)
        messages = [{"role": "user", "content": text}]
        if rng.random() < 0.15:
            messages.insert(0, {"role": "system", "content": rng.choice(systems)})
        conversations.append(messages)
    return conversations


def _split(text: str) -> list[str]:
    return [part for line in text.splitlines() for part in line.split("|")]
