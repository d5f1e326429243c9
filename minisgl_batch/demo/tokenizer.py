"""The demo model's tokenizer: byte-level BPE of 1,024 entries, trained on the generated data, and its chat template.

Bytes are the alphabet, so any text survives a round trip; each digit is a token of its own, because arithmetic and
sorting are learned digit by digit. Used by `train.py`.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from minisgl_batch.demo.data import Generator, Turn

VOCAB_SIZE = 1024
PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = [PAD, END, "<|system|>", "<|user|>", "<|assistant|>"]  # ids 0, 1, ...
PAD_ID, END_ID = 0, 1
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""
# One digit; a word with the space before it; other marks likewise; white space.
_PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def build_tokenizer(seed: int, num_conversations: int = 40_000) -> Tokenizer:
    """Train the vocabulary on a stream of conversations of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    generator = Generator(f"{seed}:tokenizer")
    texts = (turn.text for _ in range(num_conversations) for turn in generator.short_conversation())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_conversation(tokenizer: Tokenizer, turns: list[Turn]) -> tuple[list[int], list[bool]]:
    """Token ids as the chat template gives them, and which of them the model is to learn.

    To be learned are the assistant's turns, with the marks that open and close them.
    """
    ids: list[int] = []
    learned: list[bool] = []
    for role, text, spelled in turns:
        pieces = list(text) if spelled else [text]
        turn_ids = [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False).ids]
        if role:
            turn_ids = [SPECIAL_TOKENS.index(f"<|{role}|>"), *turn_ids, END_ID]
        ids += turn_ids
        learned += [role == "assistant"] * len(turn_ids)
    return ids, learned
