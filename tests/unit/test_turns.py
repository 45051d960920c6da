"""Token trees: turns are joined without a token lost, doubled or tokenised anew; forks share, and train once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import templates
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgraph import Tokenizer
from hops import turns

EOS = "<|im_end|>"
Messages = list[dict[str, str]]


@pytest.fixture(scope="module")
def tokenizer(smollm2: str) -> Tokenizer:
    return Tokenizer(smollm2)


def ids_of(path: turns.Path) -> list[int]:
    return [int(i) for piece in path for i in piece.ids]


def begin(tok: Any, messages: Messages) -> turns.Tree:
    text = tok.chat(messages)
    return turns.root(text, tok.encode(text))


def sample(tree: turns.Tree, tok: Any, prompt: turns.Path, ids: list[int]) -> turns.Tree:
    """Token number i has the log-probability -i and the version i."""
    numbers = np.arange(tree.sampled, tree.sampled + len(ids), dtype=np.int32)
    return turns.grow(tree, prompt, len(tree.grown), np.array(ids), -numbers.astype(np.float32), numbers, tok)


def say(tree: turns.Tree, tok: Any, messages: Messages, reply: str) -> turns.Tree:
    """The tree after a turn in which the model answers `reply`, in the tokens of its text."""
    prompt = turns.prompt_of(tree, tok.chat(messages), tok)
    return sample(tree, tok, prompt, tok.encode(reply).tolist())


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


words = st.text(st.sampled_from("ab1 \n<|.é😀"), max_size=12)
solid = st.from_regex(r"[ab1é](?:[ab1 \n.😀]*[ab.])?", fullmatch=True)  # neither begins nor ends with a space


@pytest.mark.parametrize("name", templates.NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_m2_joined_turns_are_the_tokens_of_the_whole_rendering(
    tokenizer: Tokenizer, name: str, data: st.DataObject
) -> None:
    """Case M2, against tokenising everything once: no newline lost, no BOS doubled, no special token dropped."""
    tok = templates.of(tokenizer, name)
    messages = [user(data.draw(words))]
    tree = begin(tok, messages)
    for _ in range(data.draw(st.integers(1, 4))):
        answer, ended = data.draw(solid), data.draw(st.booleans())
        # the model begins as the template begins an answer
        tree = say(tree, tok, messages, (" " if name == "INLINE" else "") + answer + (EOS if ended else ""))
        messages += [assistant(answer), user(data.draw(words))]
    text = tok.chat(messages)
    path = turns.prompt_of(tree, text, tok)
    assert ids_of(path) == tok.encode(text).tolist()
    assert len(tree.paths) == 1
    assert ids_of(path)[: turns.length(tree.paths[0])] == ids_of(tree.paths[0])


@pytest.mark.parametrize("name", templates.NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_history_is_spelled_to_the_letter_and_each_sampled_token_is_trained_once(
    tokenizer: Tokenizer, name: str, data: st.DataObject
) -> None:
    """Cases M3, M4: histories that are cut, rewritten, repeated; replies of any tokens, their text cut or not."""
    tok = templates.of(tokenizer, name)
    first = [user(data.draw(words))]
    tree, histories = begin(tok, first), [first]
    for _ in range(data.draw(st.integers(1, 6))):
        messages = list(data.draw(st.sampled_from(histories)))
        messages = messages[: data.draw(st.integers(1, len(messages)))]
        if data.draw(st.booleans()):
            messages = [*messages, user(data.draw(words))]
        text = tok.chat(messages)
        path = turns.prompt_of(tree, text, tok)
        assert "".join(piece.text for piece in path) == text
        assert tok.decode(ids_of(path), skip_special=False) == text
        before = tree
        reply = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=5))
        reply += [tok.eos_ids[0]] * data.draw(st.booleans())
        tree = sample(tree, tok, path, reply)
        assert tree.sampled == before.sampled + len(reply)
        for old in before.paths:  # it is there still, or goes on
            assert any(ids_of(new)[: turns.length(old)] == ids_of(old) for new in tree.paths)
        histories.append([*messages, assistant(tok.decode(reply))])
    check_flat(tree)


def check_flat(tree: turns.Tree) -> None:
    flat = turns.flatten(tree)
    rows = [flat.tokens[a:b].tolist() for a, b in itertools.pairwise(flat.leaf_offsets)]
    is_sampled = flat.sampled >= 0
    assert sorted(flat.sampled[flat.mask].tolist()) == list(range(tree.sampled))
    assert set(flat.sampled[is_sampled].tolist()) == set(range(tree.sampled))
    assert sorted(rows) == sorted(map(ids_of, turns.leaves(tree)))
    assert flat.logprobs.tolist() == np.where(is_sampled, -flat.sampled, 0).tolist()
    assert flat.versions.tolist() == flat.sampled.tolist()  # what the test's sampling gave
    for start, end in itertools.pairwise(flat.leaf_offsets):
        assert is_sampled[start:end].any()
        assert not flat.mask[start:end][~is_sampled[start:end]].any()
    first: dict[int, int] = {}
    for at in np.flatnonzero(is_sampled):
        assert flat.mask[at] == (first.setdefault(int(flat.sampled[at]), at) == at)


def test_sampled_ids_stay_where_their_text_would_give_others(tokenizer: Tokenizer) -> None:
    spelled = [int(i) for letter in "hello" for i in tokenizer.encode(letter)]
    assert spelled != tokenizer.encode("hello").tolist()
    messages = [user("hi")]
    tree = begin(tokenizer, messages)
    tree = sample(tree, tokenizer, turns.prompt_of(tree, tokenizer.chat(messages), tokenizer), spelled)
    path = turns.prompt_of(tree, tokenizer.chat([*messages, assistant("hello"), user("yes?")]), tokenizer)
    assert ids_of(path)[: turns.length(tree.paths[0])] == ids_of(tree.paths[0])


def test_a_reply_that_ends_inside_a_character_goes_on(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("😀").tolist()[:1]
    messages = [user("hi")]
    tree = begin(tokenizer, messages)
    tree = sample(tree, tokenizer, turns.prompt_of(tree, tokenizer.chat(messages), tokenizer), half)
    path = turns.prompt_of(tree, tokenizer.chat([*messages, assistant(tokenizer.decode(half))]), tokenizer)
    assert ids_of(path)[: turns.length(tree.paths[0])] == ids_of(tree.paths[0])


def test_a_template_that_strips_thinking_forks_where_the_first_answer_began(tokenizer: Tokenizer) -> None:
    tok = templates.of(tokenizer, "STRIPS_THINKING")
    messages = [user("1+1?")]
    tree = begin(tok, messages)
    tree = say(tree, tok, messages, "<think>\none and one\n</think>\n\n2" + EOS)
    messages += [assistant("<think>\none and one\n</think>\n\n2"), user("sure?")]
    tree = say(tree, tok, messages, "yes" + EOS)
    one, two = turns.leaves(tree)
    shared = turns.length(one[:1])
    assert ids_of(one)[:shared] == ids_of(two)[:shared] == tok.encode(tok.chat(messages[:1])).tolist()
    assert ids_of(two)[: turns.length(two[:-2])] == tok.encode(tok.chat(messages)).tolist()
    flat = turns.flatten(tree)
    assert tok.decode(flat.tokens[flat.mask]) == "<think>\none and one\n</think>\n\n2yes"


def test_two_answers_to_one_prompt_are_two_leaves_and_a_longer_one_goes_on_from_its_own(
    tokenizer: Tokenizer,
) -> None:
    messages = [user("hi")]
    tree = begin(tokenizer, messages)
    for reply in ("red", "blue", "red"):
        tree = say(tree, tokenizer, messages, reply + EOS)
    assert len(turns.leaves(tree)) == 3
    tree = say(tree, tokenizer, [*messages, assistant("blue"), user("why?")], "so" + EOS)
    assert [turns.length(path) for path in turns.leaves(tree)][1] == max(
        map(turns.length, turns.leaves(tree))
    )
    check_flat(tree)


def test_turns_under_way_at_once_from_one_path_are_branches(tokenizer: Tokenizer) -> None:
    messages = [user("hi")]
    tree = say(begin(tokenizer, messages), tokenizer, messages, "a" + EOS)
    after = [
        turns.prompt_of(tree, tokenizer.chat([*messages, assistant("a"), user(q)]), tokenizer) for q in "xy"
    ]
    for path in after:
        tree = sample(tree, tokenizer, path, tokenizer.encode("b").tolist())
    assert len(turns.leaves(tree)) == 2
    check_flat(tree)


def test_tokens_are_numbered_by_turn_whichever_ends_first(tokenizer: Tokenizer) -> None:
    tree = begin(tokenizer, [user("hi")])
    paths = [turns.prompt_of(tree, tokenizer.chat([user(q)]), tokenizer) for q in "xyz"]
    flats = []
    for order in ([0, 1, 2], [2, 0, 1]):
        grown = tree
        for turn in order:
            ids = np.arange(turn + 1) + 40
            grown = turns.grow(grown, paths[turn], turn, ids, -ids.astype(np.float32), ids, tokenizer)
        flats.append(turns.flatten(grown))
    for one, other in zip(*flats, strict=True):
        assert one.tolist() == other.tolist()


def test_without_a_sampled_token_there_is_one_leaf_the_prompt(tokenizer: Tokenizer) -> None:
    tree = begin(tokenizer, [user("hi")])
    flat = turns.flatten(sample(tree, tokenizer, tree.paths[0], []))
    assert flat.leaf_offsets.tolist() == [0, turns.length(tree.paths[0])]
    assert not flat.mask.any()


def test_m4_a_turn_without_a_log_probability_for_each_token_is_refused(tokenizer: Tokenizer) -> None:
    tree = begin(tokenizer, [user("hi")])
    with pytest.raises(ValueError, match="3 ids, 2 log-probabilities, 3 versions"):
        turns.grow(tree, tree.paths[0], 0, np.zeros(3), np.zeros(2), np.zeros(3), tokenizer)
