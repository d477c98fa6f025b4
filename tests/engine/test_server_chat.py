"""Conversations take the form that the model's own tokens call for."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from capplan.engine.server.chat_template import chat_template
from capplan.engine.server.schemas import Message
from capplan.engine.tokenizer import ByteTokenizer, FileTokenizer

TALK = [
    Message(role="developer", content="Be brief."),
    Message(role="user", content=[{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]),
    Message(role="assistant", content=None),
]
CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n"
    "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
)
LLAMA3 = (
    "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWho are you?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
PLAIN = "system: Be brief.\nuser: Who are you?\nassistant: \nassistant:"


@pytest.mark.parametrize(
    ("mark", "form"), [("<|im_start|>", CHATML), ("<|start_header_id|>", LLAMA3), ("<other>", PLAIN)]
)
def test_the_tokens_of_a_model_tell_its_form(tmp_path: Path, mark: str, form: str) -> None:
    alphabet = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = HfTokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(mark, special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert chat_template(FileTokenizer(tmp_path / "tokenizer.json"))(TALK) == form


@pytest.mark.parametrize("vocab_size", [100, 300])
def test_a_model_without_a_tokenizer_gets_plain_lines(vocab_size: int) -> None:
    assert chat_template(ByteTokenizer(vocab_size))(TALK) == PLAIN
