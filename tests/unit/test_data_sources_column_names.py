"""What columns look like by the words of their names."""

import pytest

from rayembed.data.sources.unread import look_of_name

NEGATIVE = """negatives negative neg hard_negatives hardNegatives hardNegative negPassages
negative_passage negative_contexts negative_answer negative_answers negative_sentence
negative_response negative_candidates negative_samples negative_examples random_negatives
bm25_negatives mined_negatives easy_negatives semi_hard_negatives rejected rejected_response
distractors wrong_answer incorrectAnswers negatives_text neg_ctx hard_negative_ctxs contradiction
irrelevant non_relevant negative_text_1 negative_1_text neg1 text_neg passage_negative NegativeDoc
hard-negatives neg_3 HARD_NEGATIVES bm25Negative2"""
SCORED = """score scores label_score similarity_score similarity cos_sim cosine_similarity sim
rating relevance_score teacher_score teacherScore ce_score negative_scores negScore score1
relevance rerankerLogits"""
LABELLED = """label labels class category topic cluster cluster_id label_text labelName class_name
intent intent_label productCategory"""
OF_PAIRS = "is_duplicate is_relevant isDuplicate is_similar is_paraphrase"
ORDINARY = """id _id title url text answer answers lang language domain scoreboard body source date
context passage document query_id doc_id author name year split license tokens length
weight rank target grade sentence1 sentence2 positive positives chosen negated negation
negotiation negligence neg_ids false_negatives num_negatives n_neg negative_count
is_negative has_label label_count scored score_date rating_agency rating_count
class_action classic subclassing category_url topical intention intentional similar
similar_questions simple cosmos relevant relevant_docs rejection rejected_reason
negative_review negative_sentiment prompting task_id multitask multiclass wrong
incorrect texting irrelevance_note labelled clustering segment integrate renegade 标签
métrique"""


@pytest.mark.parametrize(
    ("names", "look"),
    [
        (NEGATIVE, "negatives"),
        (SCORED, None),
        (LABELLED, "labels"),
        (OF_PAIRS, "labels of pairs"),
        (ORDINARY, None),
    ],
    ids=["negatives", "scores", "labels", "of pairs", "ordinary"],
)
def test_names_are_told_by_their_words(names: str, look: str | None) -> None:
    assert {name: look_of_name(name) for name in names.split()} == dict.fromkeys(
        names.split(), look
    )
