"""How people begin what they ask: first words of turns that a chat model finishes (`train.turns`).

What a small model asks by itself begins with "Can you" or "I'm planning" four times of ten
(SmolLM2-135M-Instruct, 9,984 turns); people ask for facts, code, sums, translations and summaries
too. Every beginning is drawn by a generator of random numbers from the templates below.
"""

import random

WORDS = {
    "topic": """
        volcanoes|black holes|the French Revolution|photosynthesis|inflation|jazz|chess|bees
        glaciers|vaccines|the Silk Road|gravity|democracy|coral reefs|ancient Egypt|tea|earthquakes
        the stock market|dinosaurs|the human heart|electric cars|recycling|yoga|Shakespeare|robots
        solar panels|the Roman Empire|DNA|whales|the moon landing|coffee|machine learning|castles
        the water cycle|impressionism|blockchain|the immune system|hurricanes|opera|mushrooms|wolves
        the printing press|sleep|batteries|bridges|the Cold War|penguins|poetry|trade unions|salt
        quantum computers|public transport|migration of birds|the Olympic Games|antibiotics|rivers
        architecture|the periodic table|marathons|gardening|the Great Wall of China|planets|honey
        supply and demand|tides|the Renaissance|cloud computing|nutrition|deserts|satellites|bread
        """,
    "noun": """
        a lighthouse|a bicycle|a violin|a compass|an octopus|a library|a thunderstorm|a bakery
        a lost dog|an old clock|a train station|a forest|a spaceship|a teacher|a dragon|a river
        a small village|an island|a painter|a football team|a hospital|a winter morning|a market
        a detective|a robot|a garden|a snowman|a mountain|a ship|a farmer|a letter|a key|a mirror
        """,
    "person": """
        Marie Curie|Isaac Newton|Cleopatra|Abraham Lincoln|Ada Lovelace|Mozart|Leonardo da Vinci
        Nelson Mandela|Charles Darwin|Frida Kahlo|Albert Einstein|Jane Austen|Julius Caesar
        Galileo|Florence Nightingale|Gandhi|Beethoven|Alan Turing|Queen Victoria|Aristotle
        """,
    "place": """
        Brazil|Japan|Kenya|Canada|Italy|Egypt|Australia|Norway|India|Mexico|London|Paris|Rome
        New York|the Sahara|the Amazon|Iceland|the Alps|Morocco|Vietnam|Argentina|Greece|Turkey
        """,
    "name": """
        Tom|Maria|Ahmed|Lucy|Ben|Sofia|Chen|Olivia|David|Priya|Jack|Emma|Carlos|Nina|Sam|Grace
        """,
    "thing": """
        apples|books|marbles|stickers|cookies|tickets|pencils|eggs|stamps|flowers|cards|oranges
        """,
    "language": "French|German|Spanish|Italian|Portuguese|English|Latin|Dutch",
    "program": """
        reverses a string|finds the largest number in a list|counts the vowels in a text
        checks whether a number is prime|sorts a list of dictionaries by a key|merges two lists
        removes duplicates from a list|computes the factorial of a number|reads a CSV file
        converts Celsius to Fahrenheit|checks whether a word is a palindrome|adds two matrices
        finds the most common word in a text|returns the Fibonacci sequence|parses a date
        computes the average of a list|implements a stack|implements binary search|rotates a list
        downloads a web page|validates an email address|generates a random password|flattens a list
        groups words by their first letter|counts the lines of a file|finds the median
        """,
    "function": """
        add|is_even|count_words|find_max|remove_spaces|sum_of_squares|first_index|to_upper|average
        has_duplicates|is_sorted|merge|second_largest|filter_positive|longest_word|multiply|median
        """,
    "code": "Python|Python|Python|JavaScript|Java|C++|SQL|HTML|Rust|Go|bash",
    "role": """
        a doctor|a pirate|a travel guide|an English teacher|a lawyer|a chef|a poet|a fitness coach
        a history professor|a software engineer|a salesman|a philosopher|a journalist|a scientist
        """,
}
"""What templates are filled with, by name."""
_TEMPLATES = r"""
    What is|What is the difference between {topic} and|What is the capital of {place}?
    What are the main causes of|What are the advantages and disadvantages of {topic}?
    What happens when|What does it mean when|What was the name of|What year did|What kind of
    What do you think about {topic}?|What are three facts about {topic}?|What causes
    Who was {person}?|Who invented|Who wrote|Who is the|Who was the first|Who won the
    When did|When was {person} born?|When does|When is|When was the
    Where is|Where does|Where was {person} born?|Where can you find {topic}?|Where did the
    Why do|Why is {topic} important?|Why are|Why did {person}|Why does the|Why is the
    How do {topic} work?|How does|How many|How much|How long does it take to|How far is|How old
    How can I learn about {topic}?|How do you make|How would you explain {topic} to a child?
    Which|Which of these is|Which country|Which is better,|Is it true that|Does {place} have|Are
    Explain {topic} in simple terms.|Explain how|Explain why|Explain the concept of {topic}.
    Describe {noun}.|Describe the life of {person}.|Describe {topic} in one paragraph.
    Define|List five|List the|Name three|Give me an example of|Give me five tips for
    Compare {topic} and {topic}.|Tell me about {topic}.|Tell me about {person}.|Tell me a joke
    Write a short story about {noun}.|Write a poem about {topic}.|Write a haiku about {noun}.
    Write an essay about {topic}.|Write a blog post about {topic}|Write a letter to
    Write an email to my boss|Write a dialogue between {noun} and {noun}.|Write a speech about
    Write a product description for {noun}.|Write a song about {noun}.|Write a news article about
    Write a story that begins with the sentence "|Write the introduction of a paper about {topic}
    Write a {code} function that {program}.|Write a {code} program that {program}.|Write code that
    Write a {code} class for {noun}.|Write a SQL query that|Write a regular expression that
    Write a Python function called {function} that takes|Write unit tests for a function that
    def {function}(|def {function}(numbers: list[int]) -> int:\n    '''
    Complete this function:\n\ndef {function}(|What does this code do?\n\n```python\n
    Fix the error in this {code} code:\n\n|Explain this code:\n\n```\n|Convert this to {code}:
    Translate this sentence into {language}:|Translate to {language}: "The|Translate into English: "
    Translate the following text from German to English: Die|Übersetze|Translate from French: Le
    Summarize the following text:\n\n|Summarize this article in one sentence:\n\n{topic}
    Summarize:\n\n(|Give a short summary of the story of|Summarize the history of {place}.
    Read the passage and answer the question.\n\nPassage:|Based on this text, answer:\n\n{person}
    Context: {topic}|Here is a paragraph about {topic}:\n\n|Extract the names from this text:\n\n
    Find the main idea of this paragraph:\n\n|Rewrite this sentence so that it is more polite: "
    Correct the grammar: "|Rewrite the following paragraph in a formal tone:\n\n|Make this shorter:
    {name} has {number} {thing}. {name} gives|{name} buys {number} {thing} for ${number} each.
    {name} is {number} years old.|{name} reads {number} pages a day.|A shop sells {thing} at
    A train travels at {number} km per hour|There are {number} {thing} in a box.|If {name} earns
    If a rectangle is {number} cm long|Each of {number} children gets|{name} saves ${number}
    {name} wants to buy {number} {thing}. If each|A farmer has {number} {thing}.|A recipe needs
    What is {number} + {number}?|What is {number} times {number}?|What is {number}% of {number}?
    Solve for x: {number}x +|Calculate the area of|Convert {number} miles|Simplify the expression
    Find the next number in the sequence: {number},|Let f(x) =|How many ways are there to
    Act as {role}.|You are {role}.|Pretend that you are {role} and|Imagine that you are {role}.
    Suppose that|Imagine|If you could|If I have|If it rains|Let's play|Classify the following:
    Is the sentiment of this review positive or negative? "|Label each word as|Sort these words
    Plan a trip to {place}|Recommend|Suggest a title for|Give me a recipe for|Make a table of
    Should I|Do you know|Have you ever|Please|I want to|I don't understand|My|The|In|Hello|Hi|Thanks
    A|An|This|That|There|We|She|He|It|They|When I|One|Some people|Every|For|On|At|According to
"""


def _split(text: str) -> list[str]:
    return [each.strip() for line in text.splitlines() for each in line.split("|") if each.strip()]


def beginnings(count: int = 4096) -> tuple[str, ...]:
    """So many beginnings, some of them several times; the same every time."""
    return drawn_from(_TEMPLATES, WORDS, count)


def drawn_from(templates: str, words: dict[str, str], count: int) -> tuple[str, ...]:
    """`count` texts of templates in turn, `{name}` in them one of the words of that name.

    Templates and words are parted by `|` and ends of lines; `{number}` is one from 2 to 90. The
    same for equal arguments.
    """
    drawn, choices = random.Random(0), {name: _split(text) for name, text in words.items()}
    order, made = _split(templates), list[str]()
    while len(made) < count:
        drawn.shuffle(order)
        made += [_filled(each, choices, drawn) for each in order]
    return tuple(made[:count])


def _filled(template: str, words: dict[str, list[str]], drawn: random.Random) -> str:
    text = template.replace("\\n", "\n")
    for name, choices in words.items():
        while f"{{{name}}}" in text:
            text = text.replace(f"{{{name}}}", drawn.choice(choices), 1)
    while "{number}" in text:
        text = text.replace("{number}", str(drawn.randint(2, 90)), 1)
    return text
