"""Synthetic pairs: the model's answers, which of them are questions, the file, the run on it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from made_up_articles import wikipedia_over, write_articles
from tiny_models import metaspace_tokenizer, save_decoder

from rayembed.assets.resolver import resolve_model
from rayembed.data.sources.check import check_source
from rayembed.errors import ArtifactError, DataError
from rayembed.recipes.sample import ScoreSizes
from rayembed_extras.wikipedia_sample.files import held_out_articles
from rayembed_extras.wikipedia_sample.rows import Rejected
from rayembed_papers.directions import job, measure, synthetic
from rayembed_papers.directions.catalogue import Preparation, get_directions
from rayembed_papers.directions.chat_model import answers_of
from rayembed_papers.directions.measure import Results, pairs_of, seeded, tasks_left
from rayembed_papers.directions.small import nvembed_small
from rayembed_papers.directions.synthetic import PAIRS_FILE, question_in, with_questions

CANDLE = "Candle A candle is a wick embedded in wax, which provides light when it is lit."
TEMPLATE = "{% for one in messages %}<s>{{ one['content'] }}</s>{% endfor %}<s>"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("What is a candle?", "What is a candle?"),
        ("What do candles provide? They provide light.", "What do candles provide?"),
        ('\n  Question: "Who sells  candles?"\nA shop.', "Who sells candles?"),
        ("A candle is a wick.", Rejected("no question")),
        ("", Rejected("no question")),
        ("A candle is a wick.\nWhat is it?", Rejected("no question")),
        ("Candles?", Rejected("too short")),
        ("How does basalt form?", Rejected("that of the prompt's example")),
        ("A wick embedded in wax?", Rejected("copied from the text")),
        ("What is the answer to this question?", Rejected("about nothing in the text")),
        ("What is the capital of Chile?", Rejected("about nothing in the text")),
    ],
)
def test_a_question_is_taken_from_an_answer_or_a_reason_is_told(answer, expected):
    assert question_in(answer, CANDLE) == expected


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """240 made-up articles, half of them held out, of which 60 are asked about."""
    sample = wikipedia_over(write_articles(tmp_path / "summaries.json"))
    monkeypatch.setattr(synthetic, "_SAMPLE", sample)
    monkeypatch.setattr(synthetic, "DOCUMENTS", 60)
    return sample


def asked(monkeypatch, make_answer):
    """Replace the model; the texts that it is asked about."""
    seen = []

    def answers(texts):
        seen.extend(texts)
        return [make_answer(number, text) for number, text in enumerate(texts)]

    monkeypatch.setattr(synthetic, "_answers", answers)
    return seen


def own_word(text):
    return next(word for word in text.split() if word.startswith("own"))


def test_pairs_are_of_articles_that_are_trained_on(made_up, tmp_path, monkeypatch):
    seen = asked(monkeypatch, lambda number, text: f"What speaks of {own_word(text)}? It does.")
    storage = tmp_path / "storage"
    synthetic.write_pairs(str(storage))
    with (storage / PAIRS_FILE).open() as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == len(seen) == 60
    sizes = ScoreSizes(source=made_up.source, held_out=120, documents=100, queries=100)
    held_out = {article.title for article in held_out_articles(sizes)}
    assert len(held_out) == 120
    assert held_out.isdisjoint(row["id"] for row in rows)
    for row in rows:
        word = own_word(row["positive"])
        assert row["query"] == f"What speaks of {word}?"
        assert row["id"] == f"Title{word.removeprefix('own')} Town"
    assert max(len(text.split()) for text in seen) <= synthetic._WORDS


def test_what_is_no_question_or_asked_twice_is_refused_and_counted(
    made_up, tmp_path, monkeypatch, caplog
):
    def answer(number, text):
        return ("What is this place?", "I do not know.", f"Where is {own_word(text)}?")[
            0 if number < 3 else 1 if number < 10 else 2
        ]

    asked(monkeypatch, answer)
    with caplog.at_level("INFO"):
        synthetic.write_pairs(str(tmp_path))
    lines = (tmp_path / PAIRS_FILE).read_text().splitlines()
    assert len(lines) == 51
    told = caplog.messages[-1]
    assert "51 pairs" in told
    assert "7 × no question; 2 × asked of another article" in told
    assert "about each of 60 articles" in caplog.messages[0]


def test_the_file_is_written_once_and_whole_or_not_at_all(made_up, tmp_path, monkeypatch):
    asked(monkeypatch, lambda number, text: "I do not know.")
    with pytest.raises(
        DataError, match=r"of 60 answers .* only 0 are usable questions.*60 × no question"
    ):
        synthetic.write_pairs(str(tmp_path))
    assert not (tmp_path / "papers").exists()
    assert synthetic.seconds_left(str(tmp_path)) > 0
    asked(monkeypatch, lambda number, text: f"Where is {own_word(text)}?")
    synthetic.write_pairs(str(tmp_path))
    assert synthetic.seconds_left(str(tmp_path)) == 0
    before = (tmp_path / PAIRS_FILE).read_bytes()
    seen = asked(monkeypatch, lambda number, text: f"Who made {own_word(text)}?")
    synthetic.write_pairs(str(tmp_path))
    assert seen == []
    assert (tmp_path / PAIRS_FILE).read_bytes() == before


def test_the_run_has_one_more_data_set_in_its_first_stage():
    plain = nvembed_small()
    run = with_questions(plain, "with")
    added = run.data.datasets[-1]
    assert run.data.datasets[:-1] == plain.data.datasets
    assert added.name == "synthetic"
    assert added.mining == plain.data.datasets[0].mining
    assert run.stages[0].datasets == {**plain.stages[0].datasets, "synthetic": 0.3}
    assert run.stages[0].steps == plain.stages[0].steps
    assert run.stages[0].batch == plain.stages[0].batch
    assert run.stages[1:] == plain.stages[1:]
    sentences = next(one for one in plain.data.datasets if one.name == "wiki-sentence")
    assert added.num_samples == sentences.num_samples


def test_neither_name_nor_fingerprint_depends_on_the_storage(tmp_path):
    run = with_questions(nvembed_small(), "with")
    one, other = (seeded(run, 0, str(tmp_path / name)) for name in ("one", "other"))
    assert one.name == other.name
    assert one.fingerprint == other.fingerprint
    assert one.data.root != other.data.root
    assert str(tmp_path) not in json.dumps(one.identity())
    (tmp_path / "one" / "papers").mkdir(parents=True)
    row = {"id": "Candle", "query": "What is a candle?", "positive": "it is a wick in wax."}
    (tmp_path / "one" / PAIRS_FILE).write_text(json.dumps(row) + "\n")
    found = check_source(one.data.datasets[-1], one.data.root)
    assert [Path(place) for place in found.dataset.source.paths.values()] == [
        tmp_path / "one" / PAIRS_FILE
    ]
    with pytest.raises(DataError):
        check_source(other.data.datasets[-1], other.data.root)


@pytest.fixture
def steps(monkeypatch):
    """What is done, in order: `pairs` for writing, and whether each run that is trained has them.

    Writing takes 900 expected seconds, a run 60.
    """
    done = []

    def write(storage):
        if "pairs" not in done:
            done.append("pairs")

    def left(storage):
        return 0.0 if "pairs" in done else 900.0

    def train(run):
        done.append(any(one.name == "synthetic" for one in run.data.datasets))
        raise DataError("no more of it")

    monkeypatch.setattr(measure, "estimate", lambda run: type("E", (), {"seconds": 60.0}))
    monkeypatch.setattr(measure, "train", train)
    monkeypatch.setattr(job, "_track", lambda *_: None)
    (claim,) = get_directions(["synthetic"])
    claim = replace(claim, preparation=Preparation(PAIRS_FILE, left, write))
    monkeypatch.setattr("rayembed_papers.directions.catalogue.directions", lambda: (claim,))
    return done


def test_pairs_are_written_before_the_first_run_that_reads_them(steps, tmp_path):
    assert job.run_directions(["--seeds", "2", "--storage-path", str(tmp_path)]) == 1
    assert steps == ["pairs", True, False, True, False]


def test_time_counts_the_writing_and_a_dry_run_writes_nothing(steps, tmp_path, capsys):
    arguments = ["--seeds", "1", "--storage-path", str(tmp_path)]
    assert job.run_directions([*arguments, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert steps == []
    assert not any(tmp_path.iterdir())
    assert PAIRS_FILE in told
    assert "2 runs, 0.3 hours" in told
    # There is time for a run, and none for one that is written for first.
    assert job.run_directions([*arguments, "--hours", "0.2"]) == 1
    assert steps == [False]
    assert job.run_directions([*arguments, "--hours", "0.3"]) == 1
    assert steps == [False, "pairs", True, False]


def test_the_run_without_pairs_waits_for_none(tmp_path):
    (claim,) = get_directions(["synthetic"])
    tasks = tasks_left([claim], [0], Results(str(tmp_path)))
    ((better, worse),) = pairs_of(claim, [0], str(tmp_path))
    assert {task.run.name: task.preparation for task in tasks} == {
        better.name: claim.preparation,
        worse.name: None,
    }


CONVERSATIONS = [
    [
        {"role": "system", "content": "the cat is larger than the dog"},
        {"role": "user", "content": content},
    ]
    for content in ("a lazy fox", "the quick brown fox jumps over the lazy dog", "dogs", "a lazy")
]


@pytest.fixture
def chat(tmp_path):
    tokenizer = metaspace_tokenizer()
    tokenizer.chat_template = TEMPLATE
    sizes = {"tie_word_embeddings": True, "vocab_size": len(tokenizer)}
    return save_decoder(tmp_path / "chat", tokenizer=tokenizer, **sizes)


def alone(folder, conversation, new_tokens):
    """Tokens of the likeliest answer, by a pass over the whole text for each."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    begun = len(ids)
    for _ in range(new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
    return tokenizer, ids[begun:]


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_answers_are_those_of_one_prompt_at_a_time(chat, batch_size):
    settings = {"new_tokens": 6, "batch_size": batch_size, "stop": "<unk>"}
    threads, found = torch.get_num_threads(), {}
    for place, answer in answers_of(chat, CONVERSATIONS, **settings):
        assert not torch.is_inference_mode_enabled()
        found[place] = answer
    assert torch.get_num_threads() == threads
    assert found.keys() == set(range(4))
    for place, conversation in enumerate(CONVERSATIONS):
        tokenizer, tokens = alone(chat, conversation, 6)
        end = tokens.index(2) if 2 in tokens else len(tokens)
        assert found[place] == tokenizer.decode(tokens[:end], skip_special_tokens=True)
    assert len(set(found.values())) > 1


def test_an_answer_ends_at_the_token_that_stops_it(chat):
    tokenizer, tokens = alone(chat, CONVERSATIONS[0], 6)
    stop = tokenizer.convert_ids_to_tokens(tokens[2])
    settings = {"new_tokens": 6, "batch_size": 4, "stop": stop}
    found = dict(answers_of(chat, CONVERSATIONS, **settings))
    end = tokens.index(tokens[2]) + 1
    assert found[0] == tokenizer.decode(tokens[:end], skip_special_tokens=True)
    assert found[0] != tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_model_without_weights_that_write_is_refused(tmp_path):
    tokenizer = metaspace_tokenizer()
    tokenizer.chat_template = TEMPLATE
    folder = save_decoder(tmp_path / "chat", tokenizer=tokenizer, tie_word_embeddings=False)
    with pytest.raises(ArtifactError, match=r"lacks 1 weights .*lm_head"):
        list(answers_of(folder, CONVERSATIONS, new_tokens=1, batch_size=1, stop="?"))


@pytest.mark.assets
def test_the_samples_model_asks_about_a_text():
    asking = [synthetic._conversation(text) for text in (CANDLE, "Mites are small arachnids.")]
    folder = resolve_model(synthetic._MODEL)
    found = dict(answers_of(folder, asking, new_tokens=24, batch_size=2, stop="?"))
    assert question_in(found[0], CANDLE) == found[0]
    assert "mite" in found[1].lower()
