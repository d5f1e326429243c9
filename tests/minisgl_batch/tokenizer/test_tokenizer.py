from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from minisgl_batch.errors import ModelError, RequestError
from minisgl_batch.tokenizer import ModelTokenizer, chat
from tests.minisgl_batch.tokenizer.conftest import CHATML

PROMPTS = ["The quick brown fox", "안녕하세요 👩‍👩‍👧‍👦", "", " kůň\n\n", "<|im_start|>user"]
ModelFolder = Callable[..., Path]
USER = {"role": "user", "content": "Hi dog"}


@pytest.fixture
def chatml(chatml_folder: Path) -> ModelTokenizer:
    return ModelTokenizer.load(chatml_folder)


@pytest.fixture
def strict(strict_folder: Path) -> ModelTokenizer:
    return ModelTokenizer.load(strict_folder)


@pytest.mark.parametrize("folder", ["chatml_folder", "strict_folder"])
def test_prompts_are_encoded_as_hugging_face_does(folder: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(folder)
    tokenizer, hugging_face = ModelTokenizer.load(path), AutoTokenizer.from_pretrained(path)
    encoded = tokenizer.encode_prompts(PROMPTS)
    for prompt, ids in zip(PROMPTS, encoded, strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == hugging_face(prompt).input_ids == tokenizer.encode_prompt(prompt).tolist()
        expected = hugging_face.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokenizer.detokenizer.decode_full(ids.tolist()) == expected


def test_text_gets_bos_and_a_chat_no_second_one(strict: ModelTokenizer) -> None:
    assert strict.encode_prompt("dog").tolist().count(1) == 1
    assert strict.render_chat([USER]) == "<s>[INST] Hi dog [/INST]"
    assert strict.encode_chat([USER]).tolist().count(1) == 1
    prompt, chat = strict.encode_inputs(["dog", [USER]])
    np.testing.assert_array_equal(prompt, strict.encode_prompt("dog"))
    np.testing.assert_array_equal(chat, strict.encode_chat([USER]))


def test_chat_ends_where_the_answer_begins(chatml: ModelTokenizer) -> None:
    text = "<|im_start|>user\nHi dog<|im_end|>\n<|im_start|>assistant\n"
    assert chatml.render_chat([USER]) == text
    np.testing.assert_array_equal(chatml.encode_chat([USER]), chatml.encode_prompt(text))


def test_system_text_goes_before_messages_without_one(chatml: ModelTokenizer) -> None:
    own = {"role": "system", "content": "own"}
    assert chatml.render_chat([USER], "given") == chatml.render_chat([{"role": "system", "content": "given"}, USER])
    assert chatml.render_chat([own, USER], "given") == chatml.render_chat([own, USER])


def test_text_parts(chatml: ModelTokenizer) -> None:
    parts = [{"type": "text", "text": "Hi"}, "dog"]
    assert chatml.render_chat([{"role": "user", "content": parts}]) == chatml.render_chat(
        [{"role": "user", "content": "Hi\ndog"}]
    )


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], r"messages\[0\] must be an object with a role"),
        ([USER, "x"], r"messages\[1\] must be an object with a role"),
        ([{"role": "user"}], r"messages\[0\].content must be text, got NoneType"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be text, got int"),
        (
            [{"role": "user", "content": ["a", {"type": "image_url"}]}],
            r"messages\[0\].content\[1\] is of type 'image_url'",
        ),
        ([{"role": "user", "content": "\ud83d"}], "surrogate"),
        ([USER, USER], "roles must alternate"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "roles must alternate"),
    ],
)
def test_messages_that_can_not_be_used(strict: ModelTokenizer, messages: list[Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        strict.render_chat(messages)
    assert caught.value.error_type == "invalid_request"


def test_system_text_that_the_template_refuses(strict: ModelTokenizer) -> None:
    with pytest.raises(RequestError, match="chat template refuses the messages: roles must alternate"):
        strict.encode_chat([USER], system="given")


def test_template_that_stumbles(model_folder: ModelFolder) -> None:
    template = "{{ messages[0]['content'] + messages[0]['missing'] + 1 }}"
    tokenizer = ModelTokenizer.load(model_folder(tokenizer_config={"chat_template": template}))
    with pytest.raises(RequestError, match="chat template refuses"):
        tokenizer.encode_chat([USER])
    assert tokenizer.eos_ids == ()


def test_template_that_asks_for_more_memory_than_there_is(model_folder: ModelFolder) -> None:
    template = "{{ messages[0].content * 10 ** 17 }}"
    tokenizer = ModelTokenizer.load(model_folder(tokenizer_config={"chat_template": template}))
    with pytest.raises(RequestError, match="chat template refuses the messages: MemoryError"):
        tokenizer.encode_chat([USER])


def test_template_without_an_end(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(chat, "PROBE_S", 0.2)
    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", lambda *_, **__: released.wait(60))
    folder = model_folder(tokenizer_config={"chat_template": "{{ messages }}"})
    with pytest.raises(ModelError, match=r"the chat template has taken 0\.2 s for two short messages") as caught:
        ModelTokenizer.load(folder)
    released.set()
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("template", "drops_tools"),
    [
        ("{{ messages }}{{ my_tools }}", True),
        ("{% if tools %}{{ tools }}{% endif %}{{ messages }}", False),
        ([{"name": "default", "template": "{{ messages }}"}], True),
        ([{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ tools }}"}], False),
        (None, False),
    ],
)
def test_whether_the_template_drops_tools(model_folder: ModelFolder, template: Any, drops_tools: bool) -> None:
    folder = model_folder(tokenizer_config={} if template is None else {"chat_template": template})
    assert ModelTokenizer.load(folder).drops_tools == drops_tools


def test_model_without_a_chat_template(model_folder: ModelFolder) -> None:
    tokenizer = ModelTokenizer.load(model_folder())
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match=r"no chat template: put one into its folder as chat_template\.jinja, or"):
        tokenizer.encode_chat([USER])
    folder = model_folder()
    (folder / "chat_template.jinja").write_text(CHATML)
    given = ModelTokenizer.load(folder)
    expected = ModelTokenizer.load(model_folder(tokenizer_config={"chat_template": CHATML}))
    assert given.encode_chat([USER]).tolist() == expected.encode_chat([USER]).tolist()


@pytest.mark.parametrize("ids", [[-1], [10_000_000], [1 << 70], [1.0], [True], ["1"], [[1]], [[1], [2, 3]], [None]])
def test_ids_that_the_model_does_not_have(chatml: ModelTokenizer, ids: list[Any]) -> None:
    with pytest.raises(RequestError) as caught:
        chatml.encode_ids(ids)
    assert caught.value.error_type == "invalid_request"


def test_ids_are_taken_as_they_are(chatml: ModelTokenizer) -> None:
    ids = [0, 1, chatml.vocab_size - 1]
    assert chatml.encode_ids(ids).tolist() == ids
    assert chatml.encode_ids(np.array(ids)).dtype == np.int32
    assert chatml.encode_ids([]).tolist() == []


def test_texts_that_a_tokenizer_can_not_encode(model_folder: ModelFolder) -> None:
    words = Tokenizer(models.WordLevel({"dog": 0, "user": 1}))  # and no token for unknown ones
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message.content }} <|end|>{% endfor %}"
    tokenizer = ModelTokenizer.load(model_folder(words, tokenizer_config={"chat_template": template}))
    chat = [{"role": "user", "content": "dog"}]
    dog, cat, refused, ids, user = tokenizer.encode_inputs(["dog dog", "dog cat", chat, [0], "user"])
    assert [list(given) for given in (dog, ids, user) if not isinstance(given, RequestError)] == [[0, 0], [0], [1]]
    for error in (cat, refused):
        assert isinstance(error, RequestError)
        assert error.error_type == "invalid_request"
        assert "the model's tokenizer can't encode this text: WordLevel error" in str(error)
    for ask in (
        lambda: tokenizer.encode_words(("cat",)),
        lambda: tokenizer.encode_choices("dog", np.array([0]), [" user", " cat"]),
        lambda: tokenizer.encode_choices([0], np.array([0]), ["cat"]),
    ):
        with pytest.raises(RequestError, match="can't encode this text"):
            ask()


def test_one_bad_input_does_not_spoil_the_others(chatml: ModelTokenizer) -> None:
    inputs: list[Any] = ["the dog", [USER], [5, 6], "\ud83d dog", [{"role": "user"}], [-5], [], "quick"]
    encoded = chatml.encode_inputs(inputs, system="given")
    failed = [isinstance(result, RequestError) for result in encoded]
    assert failed == [False, False, False, True, True, True, False, False]
    expected = {
        0: chatml.encode_prompt("the dog"),
        1: chatml.encode_chat([USER], "given"),
        2: np.array([5, 6]),
        6: np.array([]),
        7: chatml.encode_prompt("quick"),
    }
    for index, ids in expected.items():
        np.testing.assert_array_equal(encoded[index], ids)


def test_eos_ids_are_united(chatml_folder: Path) -> None:
    """The tokenizer says 0, the template ends turns with 2, the files add their own."""
    config = json.loads((chatml_folder / "config.json").read_text())
    (chatml_folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 11}))
    (chatml_folder / "generation_config.json").write_text('{"eos_token_id": [12, 2]}')
    assert ModelTokenizer.load(chatml_folder).eos_ids == (0, 2, 11, 12)


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        ("</s>", (2,)),
        (" </s>\n", (2,)),
        ("", ()),
        ("\n\nHuman:", ()),
        ("<end of turn>", ()),  # a token, but no special one: a text may hold it
    ],
)
def test_turn_end_of_the_chat_template(
    model_folder: ModelFolder, byte_fallback_tokenizer: Tokenizer, behind: str, expected: tuple[int, ...]
) -> None:
    tokenizer = Tokenizer.from_str(byte_fallback_tokenizer.to_str())
    tokenizer.add_tokens([AddedToken("<end of turn>", normalized=False)])
    template = "{% for message in messages %}" + "{{ message['content'] }}" + behind + "{% endfor %}"
    folder = model_folder(tokenizer, tokenizer_config={"chat_template": template})
    assert ModelTokenizer.load(folder).eos_ids == expected


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", None, "holds no config.json"),
        ("tokenizer.json", None, "holds no tokenizer: tokenizer.json is missing"),
        ("tokenizer.json", "{}", "can't load a tokenizer from"),
        (
            "tokenizer.json",
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "is a git-lfs pointer, .* run `git lfs pull`",
        ),
        (
            "config.json",
            '{"model_type": "qwen2", "rms_norm_eps": "1", "vocab_size": 9, "max_position_embeddings": 9}',
            "field 'rms_norm_eps': .*expected float",
        ),
    ],
)
def test_folder_that_can_not_be_used(chatml_folder: Path, file: str, content: str | None, says: str) -> None:
    if content is None:
        (chatml_folder / file).unlink()
    else:
        (chatml_folder / file).write_text(content)
    with pytest.raises(ModelError, match=says) as caught:
        ModelTokenizer.load(chatml_folder)
    assert str(chatml_folder) in str(caught.value)


def test_process_that_hides_torch_loads_a_tokenizer_without_it(chatml_folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from minisgl_batch.tokenizer import ModelTokenizer, hide_torch\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "hide_torch()\n"
        f"tokenizer = ModelTokenizer.load(Path({str(chatml_folder)!r}))\n"
        "print(tokenizer.encode_chat([{'role': 'user', 'content': 'Hi'}]).tolist(), tokenizer.eos_ids)\n"
        "assert sys.modules['torch'] is None\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    here = ModelTokenizer.load(chatml_folder)
    ids = here.encode_chat([{"role": "user", "content": "Hi"}]).tolist()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{ids} {here.eos_ids}\n", "")


def test_choices_are_split_from_texts_as_when_all_is_encoded(
    any_tokenizer: Tokenizer, model_folder: ModelFolder, rng: random.Random
) -> None:
    """Also where only the text's last words are encoded again."""
    folder = model_folder(any_tokenizer)
    tokenizer, hugging_face = ModelTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    words = [
        "the",
        "quick",
        "ůň",
        "aaaa",
        "aaaaaaaaaaaaaaaa",
        "12",
        "345",
        "don't",
        "안녕",
        "<think>",
        "<s>",
        "{x}",
        "  ",
        "\n",
    ]

    def text(num_words: int) -> str:
        return "".join(rng.choice(["", " ", " ", " "]) + rng.choice(words) for _ in range(num_words))

    for _ in range(60):
        prompt = "a" + text(rng.randint(0, 40)) + rng.choice(["", "", " ", " \n"])
        choices = [text(rng.randint(1, 4)) or "x" for _ in range(3)]
        known = hugging_face(prompt.rstrip()).input_ids
        want = [hugging_face(prompt + choice).input_ids[len(known) :] for choice in choices]
        if not all(want):
            with pytest.raises(RequestError, match="has no tokens of its own"):
                tokenizer.encode_choices(prompt, tokenizer.encode_prompt(prompt), choices)
            continue
        ids, endings = tokenizer.encode_choices(prompt, tokenizer.encode_prompt(prompt), choices)
        assert ids.tolist() == known
        assert [ending.tolist() for ending in endings] == want


def test_long_texts_are_not_encoded_again_for_each_choice(
    chatml: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 40
    ids, encode, num_chars = chatml.encode_prompt(prompt.rstrip()), chatml._encode, [0]

    def counting(texts: Sequence[str], **options: bool) -> Any:
        num_chars[0] += sum(map(len, texts))
        return encode(texts, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(chatml, "_encode", counting)
    chatml.encode_choices(prompt.rstrip(), ids, [" yes", " no", " the fox"])
    assert num_chars[0] < 4 * 80
