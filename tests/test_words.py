"""Words of docs, help, messages, docstrings, comments and names: those of the field, so that a
reader can search for them.

Pages are searched without fenced blocks and `inline code`, which quote printed output, but with the
comments of their commands.
"""

import ast
import io
import json
import re
import tokenize
import xml.etree.ElementTree
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from cheem_jax.cli.arguments import parse
from cheem_jax.cli.commands import COMMANDS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


class Term(NamedTuple):
    """A word to avoid: its pattern, its substitute, and a sentence that contains it."""

    pattern: str
    instead: str
    example: str


TERMS = (
    Term(
        r"(?<!no )tasks?(?: is| was)? given\b(?! by)",
        "task ID given",
        "accuracy with the task given",
    ),
    Term(
        r"given (?:the|its|their) (?:true )?task\b(?! ids?\b)",
        "given the task ID",
        "given the true task",
    ),
    Term(r"told\b", "reported, or: task ID given", "the task is never told"),
    Term(
        r"nam(?:e|es|ed|ing) (?:the|its|their|no|a) tasks?\b(?!'s)",
        "infers the task",
        "naming the task of it",
    ),
    Term(
        r"f(?:ind|inds|ound|inding) (?:the|its|their) task\b",
        "infers the task",
        "finds the task of an image",
    ),
    Term(r"task (?:and class )?found\b", "task-agnostic", "task and class found"),
    Term(
        r"networks? (?:that )?(?:was |were )?(?:found|chosen)\b",
        "target network",
        "the network found for a task",
    ),
    Term(r"(?:re)?drawn\b|draws\b|drew\b", "sampled, samples", "a path is drawn"),
    Term(
        r"(?:trained|learned|fine-tuned) by (?:itself|themselves)\b",
        "stand-alone training",
        "trained by itself",
    ),
    Term(r"of (?:its|their) own\b", "separate, own", "a network of its own"),
    Term(r"yardsticks?\b", "reference", "the yardstick"),
    Term(r"rivals?\b", "baseline", "the strongest rival"),
    Term(r"just (?:been )?(?:learned|trained)\b", "right after learning", "just learned"),
    Term(r"pictures?\b", "image", "a picture"),
    Term(r"mean class tokens?\b", "mean CLS tokens", "its mean class tokens"),
    Term(
        r"backbone's own (?:task|data|pictures|images|classes)\b",
        "pretraining data",
        "the backbone's own task",
    ),
    Term(r"programs?\b", "compiled functions", "one program per block"),
    Term(r"resumed flops\b", "shared-prefix FLOPs", "resumed FLOPs"),
    Term(r"no(?:t a)? finite numbers?\b", "non-finite", "became no finite number"),
    Term(
        r"(?<!there )(?:is|are) no"
        r" (?:architecture|run|memory|task|network|image|number|stream|folder|file)s?\b",
        "invalid, not a",
        "'x' is no architecture",
    ),
    Term(r"(?:stands?|stood)\b(?!(?: for\b|-alone\b| alone\b))", "is", "the table stands below"),
    Term(r"beside\b", "next to", "ours beside theirs"),
    Term(r"mend(?:s|ed|ing)?\b", "fixed", "mended since"),
    Term(r"anew\b", "again", "written anew"),
    Term(r"holds\b(?! (?:for|if|when|where)\b)", "contains", "the file holds names"),
    Term(r"(?:go|goes|going|gone|went) on\b", "resumes, continues", "the same command goes on"),
    Term(r"half[- ]learned\b", "interrupted", "a half-learned task"),
    Term(r"damaged?\b", "corrupted", "a damaged file"),
    Term(r"heard\b", "handled", "signals are heard"),
    Term(r"(?:is|are) the (?:least|most)\b", "at least, at most", "two are the least"),
    Term(r"kin\b|twins?\b", "variant", "its planted kin"),
    Term(r"for ever\b", "a deadlock, never", "stood still for ever"),
    Term(r"decides? alone\b", "per image", "every image decides alone"),
)
"""Words that no other project uses in this sense; each pattern begins at a word."""

PATTERNS = (
    Term(r"what(?:ever)?\b", "the noun", "what it needs"),
    Term(r"(?:whoever|that which)\b", "the noun", "whoever calls"),
    Term(r"of which\b", "two sentences", "a run, of which"),
    Term(r"gives?\b", "returns", "gives the head"),
    Term(r"lies?\b", "is", "where it lies"),
    Term(r"(?:goes|gone)\b", "passes, is removed", "as far as it goes"),
    Term(r"comes?\b", "is, follows", "images that come from zips"),
    Term(
        r"takes (?!(?:\S+ )?(?:time|(?:milli)?seconds?|minutes?|hours?)\b)",
        "accepts, uses",
        "takes a key",
    ),
    Term(r"all that\b", "every, all", "all that is known"),
    Term(r"(?:so|as) far as\b", "if, up to", "so far as they exist"),
    Term(r"from (?:\w+ ){1,3}on\b", "since, after", "from then on"),
    Term(r"(?:no|nothing|none)\b(?: \w+)? but\b", "only", "no image but the last"),
    Term(r"may\b(?! \d)", "can, might, is allowed to", "an image may be missing"),
    Term(r"where (?:there|one|nothing|something|nobody|any|none)\b", "if", "where there is one"),
    Term(r"(?-i:Where)\b(?! (?:is|are|to|images|the [\w ]+ is\b))", "if", "Where a loss is lost"),
)
"""Turns of phrase that docstrings and comments avoid on top of `TERMS`; a noun or a plain verb is
shorter."""

NAMES = {"found", "begun", "told", "taken", "known", "own", "seen", "kept", "drawn", "left"}
"""Participles that say nothing about a value, as names of variables, arguments, fields and
functions."""

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PASSAGES = re.compile(r"`[^`\n]+`|\]\([^)]*\)|^::: .*$", re.MULTILINE)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "LOG.md"]
PAGES += sorted(page for kind in ("md", "ipynb", "svg") for page in DOCS.rglob(f"*.{kind}"))


def hits_in(text: str, terms: Sequence[Term] = TERMS) -> list[str]:
    """Return every word of the text to avoid, with its substitute."""
    return [
        f"{hit[0]!r} -> {term.instead}"
        for term in terms
        for hit in re.finditer(rf"\b(?:{term.pattern})", text, re.IGNORECASE)
    ]


def text_of(page: Path) -> str:
    """Return a page, the Markdown of a notebook, or the words in a drawing."""
    match page.suffix:
        case ".ipynb":
            cells = json.loads(page.read_text())["cells"]
            return "\n\n".join(
                "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
            )
        case ".svg":
            elements = xml.etree.ElementTree.parse(page).iter()
            return "\n\n".join(
                element.text or "" for element in elements if not element.tag.endswith("style")
            )
        case _:
            return page.read_text()


def prose_of(page: Path) -> str:
    """Return a page's sentences and the comments of its commands, without code, printed lines and
    targets of links."""
    text = text_of(page)
    if page.name == "quickstart.md":  # the first paragraph talks of a family album
        title, _, rest = text.split("\n\n", 2)
        text = f"{title}\n\n{rest}"
    comments = [
        comment[1]
        for block in FENCE.findall(text)
        for comment in re.finditer(r"^\$.* # (.*)$", block, re.MULTILINE)
    ]
    return PASSAGES.sub(" ", FENCE.sub("", text)).replace("\n", " ") + "\n" + "\n".join(comments)


def help_of(name: str) -> str:
    """Return the output of `cheem NAME --help-all` on one line, so that no line break hides a
    word."""
    settings, _ = COMMANDS[name].load()
    printed = io.StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit):
        parse(settings, ["--help-all"])
    # the names of options are no sentences
    return " ".join(re.sub(r"[│╭╮╰╯─]|--[\w.-]+", " ", printed.getvalue()).split())


def messages_of(module: Path) -> Iterator[str]:
    """Return every literal in the `raise` statements of a module, without the filled-in values."""
    for raised in ast.walk(ast.parse(module.read_text())):
        if isinstance(raised, ast.Raise):
            words = [
                node.value
                for node in ast.walk(raised)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
            yield re.sub(r"`[^`]*`", " ", " ".join(words))  # names of settings are no sentences


def prose_in(module: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring and comment of a module, without `code`."""
    source = module.read_text()
    texts = [
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    texts += [
        (token.start[0], token.string.lstrip("# "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    for line, text in texts:
        yield line, " ".join(re.sub(r"`[^`]*`", "X", text).split())


def names_in(module: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of every variable, argument, field and function of a module."""
    for node in ast.walk(ast.parse(module.read_text())):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name


@pytest.mark.parametrize("term", TERMS + PATTERNS, ids=lambda term: term.example)
def test_a_word_to_avoid_is_recognised_and_its_substitute_is_not(term):
    assert re.search(rf"\b(?:{term.pattern})", term.example, re.IGNORECASE)
    assert not hits_in(term.instead, TERMS + PATTERNS)


def test_common_sentences_are_not_taken_for_words_to_avoid():
    fine = (
        "Accuracy with the task ID given, given the task ID. IM stands for internal memory."
        " Stand-alone training. Besides, the law holds for all tasks; there is no run yet. The"
        " first law holds if n > 1."
    )
    assert hits_in(fine) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_uses_the_words_of_the_field(page):
    hits = hits_in(prose_of(page))
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_help_of_a_command_uses_the_words_of_the_field(name):
    hits = hits_in(help_of(name))
    assert not hits, "\n".join(hits)


MODULES = sorted(
    module
    for folder in ("cheem_jax", "experiments")
    for module in (ROOT / folder).rglob("*.py")
    if any(messages_of(module))
)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.relative_to(ROOT).as_posix())
def test_the_errors_of_a_module_use_the_words_of_the_field(module):
    hits = [hit for message in messages_of(module) for hit in hits_in(message)]
    assert not hits, "\n".join(hits)


DESCRIBED = ("cheem_jax", "experiments", "tests")
"""Folders whose docstrings, comments and names use the words of the field."""
ALL_MODULES = sorted(
    module for folder in DESCRIBED for module in (ROOT / folder).rglob("*.py") if module.read_text()
)


@pytest.mark.parametrize(
    "module", ALL_MODULES, ids=lambda module: module.relative_to(ROOT).as_posix()
)
def test_docstrings_comments_and_names_of_a_module_use_the_words_of_the_field(module):
    hits = [
        f"{module.name}:{line}: {hit}"
        for line, text in prose_in(module)
        for hit in hits_in(text, TERMS + PATTERNS)
    ]
    hits += [
        f"{module.name}:{line}: the name {name!r} -> a noun that says what the value is"
        for line, name in names_in(module)
        if name.strip("_") in NAMES
    ]
    hits += [  # names of tests are sentences
        f"{module.name}:{line}: {name}: {hit}"
        for line, name in names_in(module)
        if name.startswith("test_")
        for hit in hits_in(name.replace("_", " "), TERMS + PATTERNS)
    ]
    assert not hits, "\n".join(hits)
