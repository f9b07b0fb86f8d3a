"""Protection from the macro substitution that torchx and torchelastic apply to the arguments of a job."""


def keep_dollars(text: str) -> str:
    """Protects text from one round of substitution, but for the macros themselves (`${app_id}`, `${local_rank}`).

    Each argument is read as a `string.Template`: names that are not known stay, `$$` shrinks to `$`. Doubling the pairs
    keeps them.
    """
    return text.replace("$$", "$$$$")
