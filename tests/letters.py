"""A tokenizer that needs no library, here or in worker processes."""

from types import SimpleNamespace


class Letters:
    """A tokenizer of one-letter tokens: no library is loaded for it."""

    def __init__(self) -> None:
        self.added_tokens_decoder = {0: SimpleNamespace(special=True, lstrip=False, rstrip=False)}
        self.chat_template = None
        self.names = ["<end>", *"abcdefghijklmnopqrstuvwxyz \n"]

    def get_vocab(self):
        return {name: number for number, name in enumerate(self.names)}

    def decode(self, tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False):
        shown = [n for n in tokens if n < len(self.names) and not (skip_special_tokens and n == 0)]
        return "".join(self.names[n] for n in shown)

    def apply_chat_template(self, conversation, tokenize, add_generation_prompt):
        assert self.chat_template
        assert not tokenize
        return "\n".join(message["content"] for message in conversation)

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return SimpleNamespace(input_ids=[self.names.index(letter) for letter in text])
