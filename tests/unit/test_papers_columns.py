"""What the papers print of a model, on the lines of a benchmark."""

import pytest

from rayembed.errors import ConfigError
from rayembed.evaluation.averages import MEAN_OF_16
from rayembed_extras.comparison.benchmark_lines import MEAN, benchmark_lines
from rayembed_papers.published.columns import lines_of_air_bench, published

MTEB = "MTEB(eng, v1)"


def test_published_figures_of_the_benchmark_itself():
    column = published("nvembed-v2", MTEB, benchmark_lines(MTEB))
    assert len(column.scores) == 56
    assert column.scores["CQADupstackRetrieval"] == 50.24
    assert (column.averages["Clustering"], column.averages[MEAN]) == (58.46, 72.31)
    assert column.origins[MEAN].source == "NV-Embed, Table 1"
    assert column.notes == ("NV-Embed-v2: as printed in NV-Embed, Tables 1 and 14.",)


def test_printed_averages_stand_where_the_tasks_contradict_them():
    column = published("gte-qwen2-7b", MTEB, benchmark_lines(MTEB))
    assert (column.averages["Clustering"], column.averages[MEAN]) == (56.92, 70.24)


def test_figures_of_the_same_tasks_hold_in_other_benchmarks():
    english = published("nomic-v2-moe", MTEB, benchmark_lines(MTEB))
    assert english.averages == {"Retrieval": 52.86}
    assert english.scores["Touche2020"] == 30.55
    assert len(english.scores) == 15
    beir = benchmark_lines("BEIR")
    assert published("nvembed-v2", "BEIR", beir).averages == {MEAN: 62.65}
    assert published("voyage-large-2", "BEIR", beir).averages == {MEAN: 58.28}
    mini = benchmark_lines("MTEB-MINI")
    column = published("causal2vec-mistral-7b", "MTEB-MINI", mini)
    assert len(column.scores) == 30
    # No paper prints these: the mean of the six figures of Table 18.
    six = (77.52, 41.63, 54.96, 22.40, 83.48, 24.86)
    assert column.averages["Retrieval"] == pytest.approx(sum(six) / 6)
    second = published("nvembed-v2", "MTEB(eng, v2)", benchmark_lines("MTEB(eng, v2)"))
    assert second.scores["STS12"] == 77.89
    assert "STS22.v2" not in second.scores
    assert "STS" not in second.averages


def test_figures_of_languages_and_both_means_of_miracl():
    column = published("nomic-v2-moe", "MIRACL", benchmark_lines("MIRACL"))
    assert column.scores["MIRACLRetrieval (sw)"] == 66.3
    assert column.averages == {MEAN_OF_16: 65.8, MEAN: 66.0}
    jina = published("jina-v3", "MIRACL", benchmark_lines("MIRACL"))
    assert (dict(jina.scores), jina.averages) == ({}, {MEAN_OF_16: 61.2})


def test_air_bench_has_no_mean_of_two_metrics():
    lines = lines_of_air_bench()["AIR-Bench_24.04"]
    column = published("nvembed-v2", "AIR-Bench_24.04", lines)
    assert column.averages == {"qa": 52.28, "long-doc": 74.78}
    assert len(column.scores) == len(lines) == 12


def test_what_is_not_there_is_told_with_the_nearest():
    others = lines_of_air_bench()
    with pytest.raises(ConfigError, match="of this model are published for BEIR, MIRACL"):
        published("jina-v3", "AIR-Bench_24.04", benchmark_lines("AIR-Bench_24.04", others))
    with pytest.raises(ConfigError, match="did you mean 'jina-v3'"):
        published("jina-3", "BEIR", benchmark_lines("BEIR"))
    with pytest.raises(ConfigError, match=r"did you mean 'AIR-Bench_24\.04'"):
        benchmark_lines("AIR-Bench_24.4", others)
