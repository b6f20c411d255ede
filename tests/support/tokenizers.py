"""Small tokenizers of the kinds that folders have, which write tokenizer.json."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
WORDS = ["one", "two", "three"]


def _merges(words):
    """Pairs that build each word letter by letter."""
    pairs = {(word[:at], word[at]): None for word in words for at in range(1, len(word))}
    return list(pairs)


def _bpe(alphabet, merges, **options):
    pieces = dict.fromkeys([*SPECIAL, *alphabet, *(left + right for left, right in merges)])
    return Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges, **options))


def _finished(tokenizer, post_processor=None, special=(), plain=()):
    tokenizer.add_special_tokens([*SPECIAL, *special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    return tokenizer


def _template(single):
    return processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])


def _byte_level(**options):
    merges = [*_merges(WORDS), *(("Ġ", word) for word in WORDS), ("Ċ", "Ċ")]
    tokenizer = _bpe(sorted(pre_tokenizers.ByteLevel.alphabet()), merges)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level(special=(), plain=()):
    """GPT-2's kind, which Qwen and gpt-oss have; with further tokens, special ones and others."""
    return _finished(_byte_level(), processors.ByteLevel(trim_offsets=True), special, plain)


def byte_level_with_bos():
    """Llama 3's kind: pieces of a regex, and "<s>" before each text."""
    tokenizer = _byte_level(use_regex=False)
    split = pre_tokenizers.Split(Regex(r" ?\w+|\s+|[^\s\w]+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    return _finished(tokenizer, _template("<s> $A"))


def llama():
    """Llama's and Mixtral's: "▁" before each text, bytes for what is unknown, "<s>" before."""
    letters = sorted({*"▁", *"".join(WORDS)})
    merges = [*_merges(WORDS), *(("▁", word) for word in WORDS)]
    alphabet = [*(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    tokenizer = _bpe(alphabet, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    space = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return _finished(tokenizer, _template("<s> $A"))


def unigram():
    """SentencePiece's unigrams, with both ends."""
    pieces = [*SPECIAL, "▁", *(f"▁{word}" for word in WORDS), *WORDS, *sorted({*"".join(WORDS), *":\n"})]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0 - len(pieces) / 99) for piece in pieces], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _finished(tokenizer, _template("<s> $A </s>"))


def words():
    """Whole words, and no decoder."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS, ":"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _finished(tokenizer)


def word_pieces():
    """BERT's kind: parts of words, without case."""
    pieces = [*SPECIAL, "two", "on", "##e", "three", ":"]
    tokenizer = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _finished(tokenizer, _template("<s> $A </s>"))
