# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Note that this module util is private to the collection: it may change at any time.

"""The phrases of which prompts are composed: real questions, since drafts of filler always hit."""

from __future__ import annotations

LANGUAGES = ("Python", "Go", "Rust", "TypeScript", "Java", "C", "C++", "Kotlin", "Ruby", "Bash")

# what a program shall do: a signature, and what is asked of it
PROGRAMS = (
    ("parse_duration(text)", "turns '1h 20m' or '90s' into seconds and refuses anything else"),
    ("merge_intervals(pairs)", "joins overlapping ranges and returns them sorted"),
    ("rate_limit(key, limit)", "allows so many calls a minute for each key, in memory"),
    ("read_config(path)", "reads key and value pairs with comments, quotes and continuation lines"),
    ("LruCache.get(key)", "keeps the most recently used entries and drops the oldest when full"),
    ("diff_lines(old, new)", "prints what was added and removed between two lists of lines"),
    ("retry(action, attempts)", "repeats a call with growing pauses and some randomness"),
    ("walk_tree(folder)", "yields all files below a folder without following links in a circle"),
    ("top_words(stream, n)", "counts words of a stream too large for memory"),
    ("shortest_path(graph, a, b)", "finds the cheapest way in a graph with weights"),
    ("validate_email(text)", "tells what is wrong with an address, not only that it is wrong"),
    (
        "paginate(query, cursor)",
        "returns one page and the cursor of the next, stable under inserts",
    ),
    ("format_bytes(count)", "prints 1536 as 1.5 KiB, for sizes up to exabytes"),
    ("Queue.pop(timeout)", "waits for an item until a moment and never loses a wake-up"),
    ("csv_to_table(lines)", "aligns columns of quoted values that hold commas and line breaks"),
    ("debounce(function, delay)", "runs only the last of several calls in quick succession"),
    ("find_duplicates(folder)", "groups files with equal content, reading as little as possible"),
    ("topological_sort(tasks)", "orders tasks by what they need, and names the circle if any"),
    ("tokenize(expression)", "splits arithmetic with names, numbers and brackets into tokens"),
    ("evaluate(tokens)", "computes arithmetic with precedence, without calling eval"),
    ("backup(source, target)", "copies only what changed, and can be stopped at any moment"),
    ("parse_log(line)", "takes an access log apart into address, time, request and status"),
    ("Matrix.multiply(other)", "multiplies in blocks that fit the cache"),
    ("schedule(jobs, workers)", "spreads jobs so that the last worker ends as early as possible"),
    ("render(template, values)", "fills in {{ names }} and refuses those that are missing"),
    ("search(text, pattern)", "finds all places of a pattern with at most one wrong letter"),
    ("hash_ring(nodes).owner(key)", "moves few keys when a node joins or leaves"),
    ("decode_varint(data)", "reads numbers of seven bits a byte and stops at broken input"),
    ("binary_search(rows, key)", "returns the first of equal rows, or where one would go"),
    ("watch(path, callback)", "tells of changes to a file, also when it is replaced as a whole"),
    ("money_add(a, b)", "adds amounts of different currencies only when a rate is known"),
    ("unique_name(base, taken)", "adds the lowest free number to a name that is taken"),
    ("wrap(text, width)", "breaks lines at words and keeps paragraphs and lists"),
    ("connect(hosts)", "tries several servers side by side and keeps the first that answers"),
    ("histogram(values, bins)", "draws bars of text that fit the terminal"),
    ("json_path(document, path)", "follows 'a.b[2].c' and says how far it came"),
    ("lock_file(path)", "makes sure that one instance runs, and survives a crash"),
    ("bloom.add(item)", "remembers items in few bits with a stated chance of error"),
    ("convert(date, zone)", "moves a date between time zones, summer time included"),
    ("sudoku(grid)", "fills in the rest of a puzzle, or says that there is no solution"),
)

CODE_TASKS = (
    "Write it with a short comment where something is not obvious, then three tests.",
    "Write it, then explain its cost in time and memory.",
    "Write it without any library beyond the standard one.",
    "First list the corner cases, then write it so that each is handled.",
    "Write a first version, criticise it, and write a better one.",
    "Write it so that it can be cancelled, and show how it is called.",
    "Write it as a small class with clear errors, and a usage example.",
    "Write it, and a benchmark that compares it with the obvious slow way.",
    "A colleague wrote this and it fails on empty input. Write a version that does not.",
    "Write it for a reader who is new to the language: simple constructs, good names.",
    "Write it so that two threads may call it at once, and say why that is safe.",
    "Write it together with a command line around it that prints help.",
)

CODE_NEEDS = (
    "It runs for months, so it must not leak.",
    "Input comes from users and may be hostile.",
    "It is called a million times a minute.",
    "It must give the same result on every machine.",
    "Errors go to the caller, never to the screen.",
    "There may be ten entries or ten million.",
    "It has to work without a network.",
    "Old callers pass nothing for new parameters.",
    "Text may be in any language, with accents and emoji.",
    "It is reviewed by people who do not know the project.",
)

TOPICS = (
    ("a balcony garden that faces north", "herbs and flowers through the year"),
    ("moving to another city with two cats", "the week before and the week after"),
    ("learning to cook for one person", "little time and a small kitchen"),
    ("a first marathon at fifty", "six months of preparation"),
    ("repairing an old bicycle", "rust, worn brakes and a bent wheel"),
    ("a birthday for thirty guests in a garden", "a plan in case it rains"),
    ("sleeping better in a hot summer", "no air conditioning"),
    ("a letter to a landlord about mould", "firm and polite"),
    ("starting a reading group at work", "people who rarely read"),
    ("a weekend in Lisbon on foot", "few steps and good food"),
    ("saving energy in a rented flat", "changes that can be undone"),
    ("teaching a child to swim", "fear of deep water"),
    ("choosing a used car", "a long way to work"),
    ("a speech for a retiring colleague", "warm and not too long"),
    ("keeping sourdough alive", "frequent travel"),
    ("making friends in a new country", "a shy person"),
    ("a vegetable stew for a large pot", "leftovers for three days"),
    ("photographing the night sky", "a simple camera"),
    ("a budget for a young family", "irregular income"),
    ("training a puppy", "a flat on the fourth floor"),
    ("writing a short story about a lighthouse", "a surprising end"),
    ("a visit to a museum with teenagers", "no boredom"),
    ("hiking in the Alps in autumn", "early snow"),
    ("a small wedding on a boat", "guests who are seasick"),
    ("building a shelf into an alcove", "walls that are not straight"),
    ("learning the guitar as an adult", "ten minutes a day"),
    ("preparing for a job interview", "a change of profession"),
    ("a quarrel about noise between neighbours", "both have a point"),
    ("packing for a month with one bag", "warm days and cold nights"),
    ("growing tomatoes from seed", "late frost"),
    ("explaining the stock market to a grandmother", "no jargon"),
    ("restoring a wooden table", "stains and scratches"),
    ("a silent retreat", "someone who talks a lot"),
    ("organising digital photos of twenty years", "three different phones"),
    ("a picnic for people with allergies", "nuts, milk and wheat"),
    ("the history of the umbrella", "odd details"),
    ("bees on the roof of an office", "worried colleagues"),
    ("a dialogue between the sea and a harbour", "gentle humour"),
    ("learning Italian before the summer", "an hour on the train each day"),
    ("making a film with a telephone", "no money at all"),
    ("a hundred years in the life of an oak", "told by the tree"),
    ("a board game about building bridges", "rules on one page"),
    ("how lighthouses work", "a curious ten-year-old"),
    ("sharing household tasks fairly", "different working hours"),
    ("winter cycling", "ice, darkness and salt"),
    ("a poem about a railway station at dawn", "no rhymes"),
    ("the difference between weather and climate", "someone in doubt"),
    ("a community kitchen", "volunteers who come and go"),
)

CHAT_TASKS = (
    "Give advice about {topic}. Mind this: {detail}.",
    "I am thinking about {topic} ({detail}). What would you ask me first, and what then?",
    "Write a friendly guide to {topic}. Do not forget {detail}.",
    "What do most people get wrong about {topic}? Take {detail} into account.",
    "Make a plan in steps for {topic}, with {detail} in mind.",
    "Tell me the story of someone who tried {topic}; it should touch on {detail}.",
    "Compare two ways to go about {topic}. What matters to me is {detail}.",
    "Explain {topic} as you would in a conversation over coffee. Mention {detail}.",
    "Write the message I could send to a friend about {topic}; mention {detail}.",
    "What would an expert say about {topic}, and what a beginner? Keep in mind {detail}.",
    "Describe a perfect day around {topic}. Somewhere there has to be {detail}.",
    "Give me ten ideas for {topic} and then choose the best. The point is {detail}.",
    "Interview a fictional person about {topic}: six questions with answers, one about {detail}.",
    "Write the opening of a newspaper column about {topic}, with a thought on {detail}.",
)

CHAT_TONES = (
    "Keep it warm.",
    "Be brief where you can, and thorough where it matters.",
    "I know little about it.",
    "I have tried once before and gave up.",
    "Please no lists.",
    "A few concrete examples would help.",
    "Say honestly where you are not sure.",
    "It may be a little funny.",
    "Write for a local newsletter.",
    "My English is not very good.",
)

# {a} to {d} are numbers, {x} and {y} people, {thing} something that can be counted
PUZZLES = (
    "{x} fills a tank of {a}00 litres at {b} litres a minute while {c} litres a minute leak out; "
    "after {d} minutes {y} mends the leak. When is it full?",
    "{x} and {y} share {a}{b} {thing} in the ratio {c} to {d}, and the rest goes to a friend. "
    "How many does each get, and what would change with the ratio turned round?",
    "A train leaves at 7:{a} with {b}0 km/h, another {c} minutes later with {d}0 km/h more. "
    "Where does it catch up, and what if the first stops for ten minutes on the way?",
    "In a row of {a} boxes {x} puts {thing} into every {c}th and {y} into every {d}th. "
    "How many boxes hold both, how many none?",
    "{x} says that the sum of {a} consecutive odd numbers is always a multiple of {b}. "
    "Prove it, or give a counterexample and mend the claim.",
    "A shop lowers the price of {thing} by {a} percent, then raises it by {b} percent. {x} thinks "
    "it is {c} percent off. Who is right, and what raise would give the old price?",
    "{x} tosses a coin {c} times, {y} once more. What is the chance that {y} has more heads? "
    "Reason first, then check it for {d} tosses.",
    "On an island each person is either honest or a liar. {x} says: at most {c} of us {a} are "
    "honest. {y} says: at least {d} are liars. What follows?",
    "A clock is {c} minutes slow every {d} hours. It was right at noon {b} hours ago. What does it "
    "show now, and when is it right again?",
    "{x} cuts a rope of {a}{b} cm into {c} parts, each {d} cm longer than the one before. How long "
    "is the shortest, and for which numbers of parts does it work at all?",
    "A committee of {c} is chosen from {a} people; {x} and {y} refuse to serve together. In how "
    "many ways? Explain two different ways to count.",
    "{x} climbs {a} stairs taking one or two at a time, but never two double steps in a row. "
    "In how many ways? Derive the rule and compute it.",
    "Two pumps empty a basin in {a} and {b} hours, a third fills it in {c} hours. All run at once "
    "from half full. What happens after {d} hours?",
    "A grid has {a} rows and {b} columns; {x} removes {c} corners. Can the rest be covered with "
    "dominoes? Prove your answer.",
    "{x} knows the product, {y} the sum of two numbers between 2 and {a}. {x} cannot tell them, "
    "{y} knew that. What pairs remain?",
    "A factory has {a} machines; each fails on {c} days of 100. How likely is it that at least "
    "{d} run? Which assumption is doubtful in practice?",
)

REASONING_TASKS = (
    "Think step by step.",
    "Show the reasoning, then check the result in another way.",
    "Set up the equations before you compute.",
    "Name each assumption that you make.",
    "Try small cases first and look for a pattern.",
    "State the answer in one sentence at the end.",
    "Explain it so that a pupil of fourteen can follow.",
    "Point out the tempting mistake.",
)

PEOPLE = (
    *("Amara", "Bogdan", "Chiara", "Daichi", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas"),
    *("Kavya", "Liam", "Mirela", "Noor", "Olek", "Priya", "Quentin", "Rosa", "Samir", "Tove"),
    *("Uma", "Viktor", "Wanda", "Ximena", "Yusuf", "Zofia"),
)

THINGS = (
    *("marbles", "apples", "stamps", "coins", "books", "tickets", "chairs", "lamps", "seeds"),
    *("bottles", "letters", "tiles", "cups", "ropes", "keys", "maps"),
)

# What documents are made of: {who}, {team}, {part}, {place}, {n} and {m} are filled in.
SENTENCES = (
    "{who} reported that the {part} in {place} had been running for {n} days without a fault.",
    "After the move to {place}, the {team} team found {n} entries of the {part} that nobody owned.",
    "The {part} was replaced on short notice, which took {n} minutes longer than planned.",
    "According to {who}, {m} percent of the requests to the {part} came from a single customer.",
    "It remains open whether the {team} team or the supplier has to answer for the {part}.",
    "{who} asked for a second reading of the figures from {place}, since the {part} had been off.",
    "In the third week the load on the {part} rose to {m} percent and stayed there.",
    "The contract for {place} ends in {n} months; {who} will negotiate the next one.",
    "A spare {part} is kept in {place}, though the label on it names another model.",
    "The {team} team measured {n} milliseconds, {who} only {m}; the difference is a riddle.",
    "Visitors from {place} were shown the {part} and wrote {n} pages of remarks.",
    "Whenever the {part} is restarted, {who} notes the time and the reason in the green book.",
    "The inspection of {place} was put off twice, at first because of the weather.",
    "{who} prefers the older {part}, which needs {n} watts less and can be mended on the spot.",
    "Of {n} complaints about the {part}, {m} percent were settled within a day.",
    "The {team} team moved its meeting to {place}, where the {part} can be heard through the wall.",
    "Without the approval of {who} nobody may change the {part}, not even for a test.",
    "Training at {place} covers the {part} on the first day and its alarms on the second.",
    "A power cut in {place} showed that the {part} comes back by itself, but the clock does not.",
    "{who} and the {team} team agreed on a limit of {n} units for each delivery to {place}.",
    "The old drawings of the {part} were found in {place}, with notes in three different hands.",
    "What the {part} costs in a year is not known exactly; {who} assumes {n} thousand.",
    "Since the repair the {part} makes a faint noise, above all in {place} and in the morning.",
    "The {team} team was asked to keep the {part} ready until {who} is back from {place}.",
    "Two of the {n} sensors at the {part} disagree by {m} percent, always in the same direction.",
    "{who} would rather stop the {part} for a whole day than be interrupted {n} times.",
    "For {place} a cheaper {part} was chosen, against the advice of the {team} team.",
    "The minutes say that {who} objected; the recording from {place} does not.",
    "When {n} people work at once, the {part} becomes slow, and at {m} percent it refuses.",
    "No reason was given for the visit to {place}, but the {part} was photographed at length.",
    "The {team} team keeps {n} days of records of the {part}; {who} would like to have a year.",
    "A student from {place} suggested to turn the {part} round, which solved half of the problem.",
    "{who} left a note at the {part}: do not touch before the delivery from {place} is here.",
    "By the end of the month {m} percent of {place} had been moved to the new {part}.",
    "The insurance covers the {part} only while somebody of the {team} team is in {place}.",
    "Between two tests of the {part}, {who} let {n} minutes pass, as the manual demands.",
)
REMARKS = (
    "I still do not see why the {part} has to be in {place}.",
    "Because {who} promised it to the {team} team, that is why.",
    "Give me {n} days and one more pair of hands, and the {part} runs.",
    "We tried that in {place}; after {n} hours the {part} was hot enough to fry an egg.",
    "Then write down what you measured, and not what you expected.",
    "Has anybody asked {who}? The last report is {n} weeks old.",
    "If {m} percent is normal, I would like to see what you call a fault.",
    "The {team} team will say no, as they did about the {part}.",
    "Nobody from {place} has called back since the delivery.",
    "I would start with the {part}; everything else can wait until spring.",
    "That costs more than a new one, and {who} knows it.",
    "Let us put it to a vote, but only after the visit to {place}.",
    "You cannot blame the {part} for a wrong address.",
    "Fine, but then {who} signs for it.",
)
EVENTS = (
    *("no change", "door opened", "alarm acknowledged", "filter cleaned", "restarted by hand"),
    *("value doubted, read again", "sensor exchanged", "shift handed over", "noise heard"),
    *("pressure low", "back to normal", "left unattended", "test run", "supplier called"),
)
TEAMS = (
    *("storage", "logistics", "night", "network", "quality", "purchasing", "field", "archive"),
    *("safety", "harbour", "billing", "research", "training", "energy", "transport", "press"),
)
PARTS = (
    *("cooling pump", "ticket printer", "door controller", "mail relay", "conveyor", "tide gauge"),
    *("backup server", "weather mast", "badge reader", "water meter", "crane", "signal box"),
    *("payroll export", "fire panel", "generator", "card index", "lift", "solar inverter"),
    *("translation service", "seat map", "greenhouse fan", "parcel scale", "ferry timetable"),
    *("boiler", "reading room", "lock gate", "phone exchange", "map server", "grain dryer"),
)
PLACES = (
    *("Aarhus", "Braga", "Cork", "Dresden", "Espoo", "Faro", "Ghent", "Hobart", "Izmir", "Jena"),
    *("Kobe", "Lviv", "Malmo", "Nantes", "Oulu", "Porto", "Quito", "Riga", "Split", "Turku"),
    *("Utrecht", "Varna", "Wexford", "Yerevan", "Zadar"),
)
HEADINGS = (
    *("Minutes", "Inspection", "Letter", "Inventory", "Travel report", "Statement", "Handover"),
    *("Complaint", "Offer", "Schedule", "Test record", "Remarks", "Incident", "Summary"),
)
LONG_TASKS = (
    "Which of the people above carries most responsibility, and where is that stated?",
    "Summarise what the documents say about costs and delays, with the names involved.",
    "Which statements contradict one another? Quote both sides and judge them.",
    "Write a briefing of one page for someone who takes over tomorrow.",
    "List all open questions, each with the person who could answer it.",
    "What happened in which order? Where is the order uncertain?",
    "Draft an answer to the most serious complaint in the documents.",
    "Which three decisions should be taken first, and on what evidence?",
)
