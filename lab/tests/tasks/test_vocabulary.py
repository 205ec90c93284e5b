import pytest

from distlion_lab.tasks.vocabulary import ByteVocabulary, CharVocabulary, WordVocabulary

TEXT = "def get_name(self):\n    return self.name  # äöü\n".encode() * 3


def test_char_vocabulary_numbers_characters_by_code_point():
    vocabulary = CharVocabulary("banäna".encode())
    assert len(vocabulary) == 5  # a b n ä, and 0 for all others
    assert vocabulary.encode("abnä".encode()).tolist() == [1, 2, 3, 4]


def test_char_vocabulary_maps_unknown_characters_to_zero():
    codes = CharVocabulary(b"abc").encode("a~zéc\U0001f600".encode())
    assert codes.tolist() == [1, 0, 0, 0, 3, 0]


def test_an_unknown_character_is_shown_as_such():
    assert CharVocabulary(b"abc").decode([1, 0, 3]) == "a\ufffdc"


@pytest.mark.parametrize("kind", [ByteVocabulary, CharVocabulary, WordVocabulary])
def test_a_text_is_decoded_from_its_tokens(kind):
    vocabulary = kind() if kind is ByteVocabulary else kind(TEXT)
    codes = vocabulary.encode(TEXT)
    assert codes.max() < len(vocabulary)
    assert vocabulary.decode(codes.tolist()) == TEXT.decode()


def test_frequent_words_are_single_tokens_with_the_space_before_them():
    vocabulary = WordVocabulary(TEXT)
    for word in ("def", " get", "return", "\n    "):
        assert len(vocabulary.encode(word.encode())) == 1


def test_names_are_cut_at_underscores_and_capital_letters():
    vocabulary = WordVocabulary(b"get_name HTTPServer")
    tokens = [vocabulary.decode([code]) for code in vocabulary.encode(b"get_name HTTPServer")]
    assert tokens == ["get", "_", "name", " HTTP", "Server"]


def test_a_word_outside_of_the_vocabulary_is_one_token_and_shown_as_an_ellipsis():
    vocabulary = WordVocabulary(b"self.name")
    codes = vocabulary.encode(b"self.other.name").tolist()
    assert len(codes) == 5 and codes[2] == 0
    assert vocabulary.decode(codes) == "self. ….name"


def test_the_most_frequent_words_are_kept_and_ties_go_by_their_bytes():
    vocabulary = WordVocabulary(b"bb aa cc cc", size=3)
    assert [vocabulary.decode([code]) for code in (1, 2)] == [" cc", " aa"]
    assert len(vocabulary) == 3
